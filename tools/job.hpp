// A call of files that is ready to run: what it writes has memory, and caches that grow are copies.
#pragma once

#include <string>
#include <vector>

#include "core/work.hpp"
#include "cpu/criterion.hpp"
#include "tools/calls.hpp"
#include "tools/device.hpp"
#include "tools/report.hpp"

namespace narrows::cli {

/// A tensor that a call writes, and the array over the same memory, in the file's order of axes.
struct Result {
  std::string name;
  Tensor tensor;
  files::Array array;
};

struct Job {
  FileCall call;
  Problem problem;
  Work work;
  bool backward = false;
  std::vector<Result> results;   // forward: o, lse, and k, v if it appends; backward: the gradients
  std::vector<Result> saved;     // backward: o, lse that forward wrote, and dout where no file has it
  std::shared_ptr<GpuCall> gpu;  // null: on the CPU

  std::string label() const { return call.prefix.empty() ? "" : call.prefix + ": "; }
  /// Computes once, on a GPU waiting for it, and answers the time it took. A forward that appends writes the same slots each time.
  double seconds() const;
  /// The results into host memory, where they are not there yet: before check and differences.
  void fetch() const;
  std::vector<Verdict> check() const;
  std::vector<Difference> differences() const;  // from the files' own results
};

/// Checked, nothing computed. Errors carry the call's prefix.
Job prepared(FileCall call, const Reading& reading);
/// Its inputs copied to a GPU, unless `device` is the CPU.
void move_to(Job& job, const Device& device);
/// What a backward job reads besides its file: o and lse. On a GPU it has them already.
void save_forward(const Job& job);

/// body(), its errors in the name of a call.
template <class Body> auto in_the_name_of(const std::string& label, Body body) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.code(), label + error.what());
  }
}

}  // namespace narrows::cli
