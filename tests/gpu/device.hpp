// A GPU for tests: why there is none, memory whose surroundings are watched, streams and graphs.
#pragma once

#include "cuda/driver.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace narrows::test {

/// Why nothing of a family runs on cuda:0; empty where it does.
std::string no_gpu(std::string_view family = "sm80");

/// Tests of one family, skipped with the reason where there is no GPU for it. The record counts them by family.
template <class Base> class OnGpu : public Base {
 protected:
  /// Outlives the test: options name it.
  virtual std::string_view family() const { return "sm80"; }
  void SetUp() override {
    Base::RecordProperty("family", std::string(family()));
    if (const std::string reason = no_gpu(family()); !reason.empty()) GTEST_SKIP() << reason;
    current_.emplace(0);
  }
  std::optional<cuda::CurrentDevice> current_;
};
using GpuTest = OnGpu<testing::Test>;

/// Tests of what every GPU family does alike.
class GpuFamilyTest : public OnGpu<testing::TestWithParam<std::string>> {
 protected:
  std::string_view family() const override { return GetParam(); }
};
inline const auto kGpuFamilies = testing::Values("sm80", "sm90");
inline std::string family_name(const testing::TestParamInfo<std::string>& info) { return info.param; }

/// Memory of the current device, filled with 0xFF: NaN in every floating type. It ends within `alignment` bytes before memory
/// that nothing may touch, and begins behind such: a kernel that reads past either end faults. With NARROWS_TEST_MEMORY=plain
/// it is an ordinary allocation, whose bounds compute-sanitizer knows.
class DeviceBlock {
 public:
  explicit DeviceBlock(std::int64_t bytes, std::int64_t alignment = 128);
  ~DeviceBlock();
  DeviceBlock(DeviceBlock&& other) noexcept;
  DeviceBlock& operator=(DeviceBlock&&) = delete;

  std::byte* data() const { return data_; }  // null: of no bytes
  std::int64_t bytes() const { return bytes_; }
  void fill(unsigned char value, void* stream = nullptr);
  void upload(const void* from, std::int64_t bytes, std::int64_t offset = 0);
  void download(void* to, std::int64_t bytes, std::int64_t offset = 0) const;
  /// Whether what lies beside it, in the same pages, is as it was.
  bool margins_intact() const;

 private:
  void map(std::int64_t alignment);

  std::int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
  // Of a mapping between two pages that are not mapped; 0: an ordinary allocation.
  std::uint64_t reserved_ = 0, mapped_ = 0, handle_ = 0;
  std::size_t page_ = 0, mapped_bytes_ = 0;
};

/// Does not wait for the legacy stream.
class TestStream {
 public:
  TestStream();
  ~TestStream();
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  void* handle() const { return stream_; }
  void wait() const { cuda::synchronise(stream_); }

 private:
  cuda::Stream stream_ = nullptr;
};

/// What a stream is given between begin and end.
class Graph {
 public:
  /// Records what `enqueue` puts on the stream. If it throws, the recording is ended and dropped.
  template <class Enqueue> Graph(const TestStream& stream, const Enqueue& enqueue) {
    begin(stream);
    try {
      enqueue();
    } catch (...) {
      drop(stream);
      throw;
    }
    end(stream);
  }
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay(const TestStream& stream) const;

 private:
  void begin(const TestStream& stream);
  void end(const TestStream& stream);
  void drop(const TestStream& stream);

  void* graph_ = nullptr;
  void* executable_ = nullptr;
};

/// Waits for everything on the current device.
void wait_for_device();
std::int64_t free_device_bytes();
cuda::Context current_context();
int current_device();

}  // namespace narrows::test
