// Programs as functions of a device that can be launched: compiled or found, loaded once, kept while the process lives.
#pragma once

#include "cuda/binary.hpp"
#include "cuda/driver.hpp"
#include "plan/program.hpp"

#include <type_traits>

namespace narrows::cuda {

/// What a caller knows a program by, which is quicker than its text: equal exactly where the programs are. Of one process.
struct ProgramKey {
  u64 low = 0, high = 0;

  bool operator==(const ProgramKey&) const = default;
};

/// Puts a key together; no number may lie across the middle.
class KeyBits {
 public:
  void add(u64 value, int width) {
    (used_ < 64 ? key_.low : key_.high) |= value << used_ % 64;
    used_ += width;
  }
  void add(i32 value, int width) { add(static_cast<u64>(value), width); }
  void add(bool value, int width) { add(u64{value}, width); }
  ProgramKey key() const { return key_; }

 private:
  ProgramKey key_;
  int used_ = 0;
};

struct Kernel {
  Function function = nullptr;
  int device = 0;
  std::string name;  // "forward_sm80 for sm_90a"
  Usage usage;
  i64 shared_limit = 0;            // largest dynamic shared memory of a launch, in bytes
  std::size_t argument_bytes = 0;  // of its one parameter; 0: the driver does not tell
  bool begins_early = false;       // Program::begins_early, on a device and by a driver that have it
};

/// Whether programs that begin early do so on the device, by its driver.
bool may_begin_early(const DeviceFacts& facts);

/// Null: not loaded yet.
const Kernel* find_kernel(int device, const ProgramKey& key);
/// Compiles where no cache has it, loads, and keeps it under `key`. Throws Error.
const Kernel& load_kernel(int device, const ProgramKey& key, const Program& program);
/// Throws Error (invalid_value) while `stream` is being captured, when nothing may be compiled or loaded.
void require_no_capture(Stream stream, const Program& program);

/// make_program() is called where the kernel is not loaded yet, and only then.
template <class MakeProgram>
const Kernel& kernel(int device, const ProgramKey& key, Stream stream, const MakeProgram& make_program) {
  if (const Kernel* loaded = find_kernel(device, key)) return *loaded;
  const Program program = make_program();
  require_no_capture(stream, program);
  return load_kernel(device, key, program);
}

/// Blocks of a launch that a multiprocessor holds at once.
int resident_blocks(const Kernel& kernel, int threads, i64 shared_bytes);

struct Grid {
  unsigned blocks = 1;
  unsigned threads = 1;  // a block
  unsigned shared_bytes = 0;
};

/// On the kernel's device, which is current. `argument`, of `bytes`, is the kernel's one parameter and is copied. One that
/// begins early may share the device with the kernel before it on the stream, until it has waited for that one's end.
void launch(const Kernel& kernel, const Grid& grid, Stream stream, const void* argument, std::size_t bytes);
template <class Argument>
requires(std::is_trivially_copyable_v<Argument> &&
         !std::is_pointer_v<Argument>) void launch(const Kernel& kernel, const Grid& grid, Stream stream,
                                                   const Argument& argument) {
  launch(kernel, grid, stream, &argument, sizeof argument);
}

}  // namespace narrows::cuda
