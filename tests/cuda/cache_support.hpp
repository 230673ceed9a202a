// A cache over a compiler that stands in for NVRTC and counts what it is asked for.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "cuda/cache.hpp"
#include "tests/cuda/small_program.hpp"
#include "tests/tools/files_support.hpp"

namespace narrows::cuda {

inline Binary stand_in(const Program& program, std::string_view architecture) {
  Binary binary;
  binary.image = "image of " + program.config;
  binary.function = program.function;
  binary.architecture = architecture;
  binary.compiler = {13, 0};
  binary.usage = {40, 1, 2, 3, 4};
  binary.log = "a log";
  binary.seconds = 0.5;
  return binary;
}

inline Digest key_of(const Program& program) { return content_key(program, "sm_80", kSmallSources); }

inline std::string entry_name(const Program& program) { return key_of(program).hex() + "-nvrtc13.0"; }

class CacheTest : public testing::Test {
 protected:
  Cache::Settings settings() {
    Cache::Settings all;
    all.disk.folder = folder();
    all.sources = kSmallSources;
    all.version = [] { return CompilerVersion{13, 0}; };
    all.compile = [this](const Program& program, std::string_view architecture, std::span<const SourceFile>) {
      ++compiled_;
      return stand_in(program, architecture);
    };
    return all;
  }
  std::string folder() const { return (directory_ / "cache").string(); }
  std::filesystem::path file(std::string_view name) const { return std::filesystem::path(folder()) / name; }
  /// What a new cache, as of a process of its own, gives; how often it compiled is in compiled_.
  std::string image(const Program& program = small_program()) {
    compiled_ = 0;
    Cache cache(settings());
    return cache.get(program, "sm_80")->image;
  }
  int count(std::string_view part) const {
    int found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder()))
      if (entry.path().filename().string().find(part) != std::string::npos) ++found;
    return found;
  }

  files::TemporaryDirectory directory_;
  std::atomic<int> compiled_{0};
};

/// What `body` answers in a process of its own; -1 where it ended otherwise.
template <class Body> pid_t start_process(const Body& body) {
  const pid_t process = fork();
  if (process == 0) {
    int answer = 99;
    try {
      answer = body();
    } catch (const std::exception& error) {
      fprintf(stderr, "%s\n", error.what());
    }
    _exit(answer);
  }
  return process;
}

inline int wait_for(pid_t process) {
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace narrows::cuda
