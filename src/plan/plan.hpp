// The decisions of a call. Pure: no tensor, no GPU, no global state.
#pragma once

#include "core/work.hpp"
#include "plan/machine.hpp"
#include "plan/roofline.hpp"

#include <span>
#include <string>
#include <variant>
#include <vector>

namespace narrows {

/// Scratch of one purpose.
struct Region {
  std::string_view name;
  i64 bytes = 0;
};

struct Plan {
  std::string_view family;
  std::string_view instruction_set;  // CPU: name of the tile kernels
  int threads = 1;
  i64 query_block = 0;    // rows of Q that a task keeps on chip
  i64 key_block = 0;      // keys of a tile
  i64 heads_at_once = 0;  // (batch, kv head) pairs whose packed K and V are in scratch together
  std::vector<Region> workspace;
  Prediction prediction;

  i64 workspace_bytes() const;
  std::string text() const;  // a decision a line
};

using Refusal = std::string;  // why a family does not take a problem, to stand after "family: "

struct Family {
  std::string_view name;
  std::variant<Plan, Refusal> (*consider)(const Problem& problem, const Work& work, const Machine& machine);
};

/// In the order that breaks ties of predicted time.
std::span<const Family> families();

/// The accepting plan with the least predicted time and, beside it, what each other family said.
/// forced: the one family to ask, empty = all. Throws Error (not_implemented) with every reason if none accepts.
struct Choice {
  Plan plan;
  std::vector<std::string> refused;  // "family: reason"
};
Choice choose(const Problem& problem, const Work& work, const Machine& machine, std::string_view forced = {});

std::variant<Plan, Refusal> consider_cpu(const Problem& problem, const Work& work, const Machine& machine);

}  // namespace narrows
