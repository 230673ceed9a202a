// The command as users call it: a process of its own, its exit code and what it printed.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/tools/files_support.hpp"
#include "tools/files/layout.hpp"
#include "tools/files/tensor_file.hpp"

namespace narrows::cli {

using files::Array;
using files::TemporaryDirectory;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

struct Outcome {
  int code = -1;
  std::string out, err;

  /// Every line of stdout, which holds nothing but objects.
  std::vector<Json> objects() const {
    std::vector<Json> parsed;
    std::size_t at = 0;
    while (at < out.size()) {
      const std::size_t end = out.find('\n', at);
      if (end == std::string::npos) {
        ADD_FAILURE() << "no newline at the end of: " << out;
        break;
      }
      parsed.push_back(Json::parse(out.substr(at, end - at)));
      at = end + 1;
    }
    return parsed;
  }
};

/// Runs `narrows words...` with `variables` (NAME=value) added to an environment without NARROWS_*.
inline Outcome narrows(const Words& words, const Words& variables = {}) {
  const TemporaryDirectory directory;
  const std::string out = (directory / "out").string(), err = (directory / "err").string();
  Words arguments = words, environment = variables;
  arguments.insert(arguments.begin(), NARROWS_CLI);
  for (char** variable = environ; *variable; ++variable)
    if (!std::string_view(*variable).starts_with("NARROWS_")) environment.emplace_back(*variable);
  const auto pointers = [](Words& strings) {
    std::vector<char*> result;
    for (std::string& string : strings) result.push_back(string.data());
    result.push_back(nullptr);
    return result;
  };
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT, 0600);
  pid_t process = 0;
  const int failure =
      posix_spawn(&process, NARROWS_CLI, &actions, nullptr, pointers(arguments).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (failure != 0) {
    ADD_FAILURE() << "cannot start " << NARROWS_CLI;
    return {};
  }
  int status = 0;
  ::waitpid(process, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), files::load(out), files::load(err)};
}

inline std::string minilm() { return NARROWS_SOURCE_DIR "/examples/minilm/minilm-layers.safetensors"; }

/// An array over memory that the vector owns.
template <class T> Array array_over(std::string name, DType dtype, const Dims& shape, std::vector<T>& values) {
  return {std::move(name), dtype, shape, files::row_major_strides(shape), std::as_bytes(std::span(values)), nullptr};
}

/// Arrays of numbers written in tests, with the memory behind them.
class Fixture {
 public:
  Fixture& add(const std::string& name, const Dims& shape, std::vector<float> values) {
    return keep(name, DType::fp32, shape, std::move(values), floats_);
  }
  Fixture& add_int64(const std::string& name, const Dims& shape, std::vector<std::int64_t> values) {
    return keep(name, DType::int64, shape, std::move(values), longs_);
  }
  Fixture& add_uint8(const std::string& name, const Dims& shape, std::vector<std::uint8_t> values) {
    return keep(name, DType::uint8, shape, std::move(values), bytes_);
  }
  std::string save(const std::filesystem::path& path) const {
    files::write_tensor_file(path, arrays_);
    return path.string();
  }

 private:
  template <class T>
  Fixture& keep(const std::string& name, DType dtype, const Dims& shape, std::vector<T> values,
                std::vector<std::unique_ptr<std::vector<T>>>& store) {
    store.push_back(std::make_unique<std::vector<T>>(std::move(values)));
    arrays_.push_back(array_over(name, dtype, shape, *store.back()));
    return *this;
  }

  std::vector<std::unique_ptr<std::vector<float>>> floats_;
  std::vector<std::unique_ptr<std::vector<std::int64_t>>> longs_;
  std::vector<std::unique_ptr<std::vector<std::uint8_t>>> bytes_;
  std::vector<Array> arrays_;
};

/// Two queries that score every key 0, four keys, values 0 1 2 3: o is the mean of the visible keys' numbers and the LSE
/// the logarithm of their count.
inline Fixture counting() {
  Fixture fixture;
  fixture.add("q", {1, 2, 1, 1}, {0, 0}).add("k", {1, 4, 1, 1}, {9, -9, 7, 5}).add("v", {1, 4, 1, 1}, {0, 1, 2, 3});
  return fixture;
}

/// The fp32 values of an array of a file.
inline std::vector<float> values_of(const std::string& path, std::string_view name) {
  const files::TensorFile file = files::read_tensor_file(path);
  const Array* const array = file.find(name);
  if (!array || array->dtype != DType::fp32) {
    ADD_FAILURE() << path << " has no fp32 " << name;
    return {};
  }
  std::vector<float> values(array->bytes.size() / sizeof(float));
  std::memcpy(values.data(), array->bytes.data(), array->bytes.size());
  return values;
}

inline std::vector<testing::Matcher<float>> near(const std::vector<float>& values) {
  std::vector<testing::Matcher<float>> matchers;
  for (const float value : values) matchers.push_back(testing::FloatNear(value, 2e-6F));
  return matchers;
}

}  // namespace narrows::cli
