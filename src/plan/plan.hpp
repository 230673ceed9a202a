// The decisions of a call. Pure: no tensor, no GPU, no global state.
#pragma once

#include "core/work.hpp"
#include "plan/machine.hpp"
#include "plan/roofline.hpp"

#include <array>
#include <initializer_list>
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

/// The few regions of a plan, in memory of their own: making a plan allocates nothing.
class Regions {
 public:
  Regions() = default;
  Regions(std::initializer_list<Region> regions) {
    for (const Region& region : regions) all_[count_++] = region;
  }
  const Region& operator[](std::size_t index) const { return all_[index]; }
  const Region& front() const { return all_.front(); }
  const Region* begin() const { return all_.data(); }
  const Region* end() const { return all_.data() + count_; }

 private:
  std::array<Region, 12> all_{};
  std::size_t count_ = 0;
};

inline constexpr i64 kScratchAlignment = 64;  // bytes; regions are whole multiples

struct Plan {
  std::string_view family;
  std::string_view instruction_set;  // CPU: name of the tile kernels
  DType operand = DType::fp32;       // CPU: of what products multiply
  i64 depth = 1;                     // CPU: elements that a product sums over come in multiples of this
  int threads = 1;
  i64 query_block = 0;    // rows of Q that a task keeps on chip
  i64 key_block = 0;      // keys of a tile
  i64 heads_at_once = 0;  // (batch, kv head) pairs whose packed K and V are in scratch together
  i64 key_chunk = 0;      // backward: keys whose dK and dV a thread holds
  i64 partials = 0;       // backward: sums of dQ of one kv head that are made side by side and added at the end
  bool packs_ahead =
      true;  // K and V of whole heads before any query block; otherwise each task packs the tiles it reads
  bool reads_in_place = false;  // few query rows: K and V are read where they lie, nothing is packed
  i64 heads_together = 1;       // reading in place: kv heads of a sequence that a task attends to; changes no bit
  bool keeps_kernel = false;    // few query rows that are packed all the same, by batch_invariant
  i64 split_keys = 0;           // keys that a task attends to before results are merged, in whole tiles; 0 = all
  // GPU:
  i64 head_width = 0, value_width = 0;  // head dims as they lie on chip
  int value_slices = 1;                 // forward: thread blocks that share the columns of V
  int warps = 0;                        // of a thread block
  int resident_blocks = 0;              // of a multiprocessor, that registers and shared memory must allow
  int copy_bytes = 0;                   // that one copy to shared memory takes; 2: shifted rows; 0: element by element
  bool skips_rescale = false;           // looks whether accumulated outputs must be rescaled
  int column_warps = 0;                 // backward: that share keys, each with a part of the columns of dK and dV
  int stages = 0;                       // backward: of Q and dO
  bool vector_sums = false;             // backward: dQ is added to four sums at a time
  bool takes_turns = false;             // backward: thread blocks add to dQ in the order of their keys
  bool decodes = false;                 // keys are shared out among thread blocks, which the device plans
  bool rereads_queries = false;         // decoding: Q is too wide to be kept in registers
  int most_splits = 0;                  // decoding: of a row's keys; 0 = as many as fill the machine
  i64 blocks = 0;                       // decoding, and appending to a cache: thread blocks
  i64 shared_bytes = 0;                 // of a thread block
  int thread_blocks = 0;                // that take tile after tile; 0: one for each
  i64 section = 1;                      // heads worked on together
  Regions workspace;
  Prediction prediction;

  i64 workspace_bytes() const;
  /// What a caller must bring for a workspace that begins anywhere.
  i64 lent_workspace_bytes() const;
  std::string text() const;  // a decision a line

 private:
  std::string cpu_text() const;
  std::string gpu_text() const;
};

using Refusal = std::string;  // why a family does not take a problem, to stand after "family: "

struct Family {
  std::string_view name;
  DeviceKind device;  // of the tensors that it takes
  std::variant<Plan, Refusal> (*consider)(const Problem& problem, const Work& work, const Machine& machine);
};

/// In the order that breaks ties of predicted time.
std::span<const Family> families();

/// The accepting plan with the least predicted time and, beside it, what each other family of the device said.
/// forced: the one family to ask, empty = all. Throws Error (not_implemented) with every reason if none accepts.
struct Choice {
  Plan plan;
  std::vector<std::string> refused;  // "family: reason"
};
Choice choose(const Problem& problem, const Work& work, const Machine& machine, std::string_view forced = {});

/// Of either operation.
std::variant<Plan, Refusal> consider_sm90(const Problem& problem, const Work& work, const Machine& machine);
std::variant<Plan, Refusal> consider_sm80(const Problem& problem, const Work& work, const Machine& machine);
std::variant<Plan, Refusal> consider_cpu(const Problem& problem, const Work& work, const Machine& machine);

}  // namespace narrows
