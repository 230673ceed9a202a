// A call with a workspace allocates nothing, takes it at any address, and refuses one that is too small.
#include <gtest/gtest.h>

#include "tests/cpu/cache_call.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<std::size_t>(bytes, 1)) != 0)
    throw std::bad_alloc();
  return memory;
}

/// Out of line: the compiler would otherwise see free() meet operator new.
[[gnu::noinline]] void release(void* memory) { std::free(memory); }
}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
// A sanitizer's own would not know that release() may free what it gave.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return counted(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return counted(bytes, static_cast<std::size_t>(alignment));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace narrows::test {
namespace {

/// Bytes of 0xFF, not aligned.
Tensor workspace_of(std::vector<std::uint8_t>& bytes, std::int64_t size) {
  bytes.assign(static_cast<std::size_t>(size) + 1, 0xFF);
  return {bytes.data() + 1, DType::uint8, {size}, {}, {}};
}

long allocations_of(Attention& a) {
  const Inputs in = a.in();
  const Outputs out = a.out();
  const long before = allocations;
  forward(in, out, a.options);
  return allocations - before;
}

/// The same results as without, and no allocation.
void expect_none(Attention& a, const std::string& what) {
  Attention owned = a;
  const Array k = a.k, v = a.v;
  forward(owned.in(), owned.out(), owned.options);  // wakes the threads too
  std::vector<std::uint8_t> bytes;
  a.options.workspace = workspace_of(bytes, workspace_size(a.in(), a.options));
  EXPECT_EQ(allocations_of(a), 0) << what;
  EXPECT_TRUE(a.o.same_bits(owned.o) && a.lse.same_bits(owned.lse)) << what;
}

TEST(Workspace, prefill_allocates_nothing) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64}) {
    Attention a({2, 300, 700, 4, 2, 40, 24}, dtype);
    a.options.causal = Causal::bottom_right;
    expect_none(a, std::string(name(dtype)));
    a.options.workspace = {};
    a.options.num_splits = 2;
    expect_none(a, "num_splits");
    a.options.workspace = {};
    a.options.threads = 3;
    expect_none(a, "threads");
  }
}

TEST(Workspace, decoding_and_caches_allocate_nothing) {
  Attention decoding({2, 1, 3000, 8, 2, 64, 64});
  expect_none(decoding, "splits");
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CacheCall call(seed);
    expect_none(call.a, "seed " + std::to_string(seed));
  }
}

/// The gradients are the same as without, and nothing is allocated.
void expect_no_gradient_allocation(Attention& a, const Gradients& gradients, const std::string& what) {
  forward(a.in(), a.out(), a.options);
  const BackwardInputs in = a.backward_in();
  backward(in, gradients, a.options);
  const Array dq = a.dq, dk = a.dk, dv = a.dv;
  std::vector<std::uint8_t> bytes;
  a.options.workspace = workspace_of(bytes, backward_workspace_size(a.in(), a.options));
  const long before = allocations;
  backward(in, gradients, a.options);
  EXPECT_EQ(allocations - before, 0) << what;
  EXPECT_TRUE(a.dq.same_bits(dq) && a.dk.same_bits(dk) && a.dv.same_bits(dv)) << what;
  a.options.workspace = {};
}

TEST(Workspace, gradients_allocate_nothing) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64}) {
    Attention a({2, 130, 300, 4, 2, 40, 24}, dtype);
    expect_no_gradient_allocation(a, a.gradients(), std::string(name(dtype)));
    a.options.threads = 3;
    expect_no_gradient_allocation(a, a.gradients(), "threads");
    Array bias(DType::bf16, {4, 1, 300}), slopes(DType::fp32, {4}), sinks(DType::fp32, {4});
    Array dbias = bias, dslopes = slopes, dsinks = sinks;
    bias.fill_gaussian(3);
    slopes.fill(0.1);
    sinks.fill(0.5);
    a.options.bias = bias;
    a.options.alibi_slopes = slopes;
    a.options.sinks = sinks;
    a.options.dropout = 0.25;
    a.options.causal = Causal::bottom_right;
    expect_no_gradient_allocation(a, {a.dq, a.dk, a.dv, dbias, dslopes, dsinks}, "every rule");
  }
}

TEST(Workspace, the_counter_counts) {
  const long before = allocations;
  const Attention a({2, 300, 700, 4, 2, 40, 24});
  EXPECT_GT(allocations, before);
}

TEST(Workspace, a_lent_one_is_what_is_used) {
  Attention a({2, 300, 700, 4, 2, 40, 24});
  std::vector<std::uint8_t> bytes;
  a.options.workspace = workspace_of(bytes, workspace_size(a.in(), a.options));
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{0xa5});
  forward(a.in(), a.out(), a.options);
  EXPECT_GT(std::count_if(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte != 0xa5; }), 100000);
}

TEST(Workspace, one_byte_too_few_is_refused_before_anything_is_written) {
  Attention a({1, 5, 7, 2, 1, 8, 8});
  const std::int64_t need = workspace_size(a.in(), a.options);
  std::vector<std::uint8_t> bytes;
  a.options.workspace = workspace_of(bytes, need - 1);
  try {
    forward(a.in(), a.out(), a.options);
    FAIL() << "not refused";
  } catch (const Error& error) {
    const std::string number = std::to_string(need);
    EXPECT_EQ(error.what(), "workspace: " + std::to_string(need - 1) + " bytes: this call needs " + number +
                                "; nearest legal: " + number);
  }
  EXPECT_TRUE(std::isnan(a.o[{0, 0, 0, 0}]));
}

TEST(Workspace, its_size_reads_no_element) {
  Attention a({1, 5, 7, 2, 1, 8, 8});
  const Inputs in{{nullptr, DType::fp32, {1, 5, 2, 8}, {}, {}},
                  {nullptr, DType::fp32, {1, 7, 1, 8}, {}, {}},
                  {nullptr, DType::fp32, {1, 7, 1, 8}, {}, {}}};
  EXPECT_EQ(workspace_size(in, a.options), workspace_size(a.in(), a.options));
}

TEST(Workspace, bytes_beside_it_stay_as_they_are) {
  Attention a({1, 1, 3000, 8, 2, 64, 64});
  const std::int64_t need = workspace_size(a.in(), a.options);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(need) + 64, 0xA5);
  a.options.workspace = {bytes.data() + 32, DType::uint8, {need}, {}, {}};
  forward(a.in(), a.out(), a.options);
  for (std::size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(bytes[i], 0xA5);
    EXPECT_EQ(bytes[bytes.size() - 1 - i], 0xA5);
  }
}

}  // namespace
}  // namespace narrows::test
