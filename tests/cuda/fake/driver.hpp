// The stand-in for the driver, as tests of what is asked of it begin.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.hpp"
#include "cuda/cache.hpp"
#include "cuda/driver.hpp"
#include "tests/cuda/fake/state.hpp"
#include "tests/tools/files_support.hpp"

namespace narrows::cuda {

inline const Stream kStream = reinterpret_cast<Stream>(0x10);

/// The driver is found by its name where a library of that name is loaded already.
inline void* stand_in() {
  static void* const library = dlopen(NARROWS_FAKE_CUDA, RTLD_NOW);
  return library;
}

class FakeDriver : public testing::Test {
 protected:
  void SetUp() override {
    setenv("NARROWS_CACHE", "off", 1);
    ASSERT_NE(stand_in(), nullptr) << dlerror();
    ASSERT_NE(find_driver().functions, nullptr) << find_driver().absence;
    fake::State& fresh = state();
    fresh.capturing = fresh.capturing_status = fresh.launch_status = fresh.allocation_status = fresh.map_status = 0;
  }
  fake::State& state() { return *reinterpret_cast<decltype(&fake_state)>(dlsym(stand_in(), "fake_state"))(); }
  int contexts() { return reinterpret_cast<decltype(&fake_has_context)>(dlsym(stand_in(), "fake_has_context"))(); }

  /// A program that a pack has for both devices.
  Program packed(const std::string& config) { return packed({"forward_sm80.cu", "forward_sm80", config, false}); }
  Program packed(const Program& program) {
    std::vector<PackEntry> entries;
    for (const char* architecture : {"sm_80", "sm_90a"}) {
      Binary binary;
      binary.image = "an image";
      binary.function = program.function;
      binary.architecture = architecture;
      entries.push_back({cache().key(program, architecture), binary});
    }
    files::save(directory_ / "a.pack", pack_bytes(entries));
    load_pack((directory_ / "a.pack").string());
    return program;
  }

  files::TemporaryDirectory directory_;
};

inline std::string error_of(const std::function<void()>& body, ErrorCode code) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace narrows::cuda
