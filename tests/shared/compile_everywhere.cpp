// src/shared is one text for every compiler: g++ and clang on the host, NVRTC for the device.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

namespace narrows {
namespace {

constexpr std::array kHeaders{"params.h",
                              "mask.h",
                              "score.h",
                              "merge.h",
                              "philox.h",
                              "forward_args.h",
                              "call_args.h",
                              "backward_args.h",
                              "status.h",
                              "tile_order.h",
                              "decode_args.h",
                              "decode_line.h",
                              "divider.h",
                              "merge_args.h",
                              "ticket.h",
                              "forward_sm90_args.h",
                              "backward_sm90_args.h",
                              "cached_forward_args.h"};

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string shared_text(const std::string& header) {
  return read(std::filesystem::path(NARROWS_SOURCE_DIR) / "src/shared" / header);
}

std::string quoted(const std::string& text) {
  std::string shell = "'";
  shell += std::regex_replace(text, std::regex("'"), "'\\''");
  return shell += "'";
}

TEST(Shared, every_header_is_listed_here) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(NARROWS_SOURCE_DIR "/src/shared")) {
    count += entry.path().extension() == ".h" ? 1u : 0u;
  }
  EXPECT_EQ(count, kHeaders.size());
  for (const char* header : kHeaders) EXPECT_FALSE(shared_text(header).empty()) << header;
}

TEST(Shared, no_macros_and_no_includes_from_elsewhere) {
  const std::regex directive(R"(^[ \t]*#[ \t]*(?!pragma once|include "shared/))", std::regex::multiline);
  for (const char* header : kHeaders) EXPECT_FALSE(std::regex_search(shared_text(header), directive)) << header;
}

class HostCompiler : public testing::TestWithParam<const char*> {};

TEST_P(HostCompiler, takes_each_header_alone_without_a_warning) {
  const std::string compiler = GetParam();
  if (std::system((compiler + " --version >/dev/null 2>&1").c_str()) != 0) GTEST_SKIP() << "no " << compiler << " here";
  for (const char* header : kHeaders) {
    const std::string stem = testing::TempDir() + "narrows_" + compiler + "_" + header;
    std::ofstream(stem + ".cpp") << "#include \"shared/" << header << "\"\n";
    const int status = std::system(
        (compiler + " -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wconversion -Werror" + " -I" +
         quoted(NARROWS_SOURCE_DIR "/src") + " " + quoted(stem + ".cpp") + " >" + quoted(stem + ".log") + " 2>&1")
            .c_str());
    EXPECT_EQ(status, 0) << header << '\n' << read(stem + ".log");
    std::filesystem::remove(stem + ".cpp");
    std::filesystem::remove(stem + ".log");
  }
}

INSTANTIATE_TEST_SUITE_P(Shared, HostCompiler, testing::Values("g++", "clang++"));

// ------------------------------------------------------------------------------------------------------------------ NVRTC

class Nvrtc {
 public:
  Nvrtc() {
    const char* chosen = std::getenv("NARROWS_NVRTC");
    for (const std::string name : {chosen == nullptr ? "" : chosen, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so",
                                   "/usr/local/cuda/lib64/libnvrtc.so"}) {
      if (library_ == nullptr && !name.empty()) library_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (library_ == nullptr) return;
    load(create_, "nvrtcCreateProgram");
    load(compile_, "nvrtcCompileProgram");
    load(destroy_, "nvrtcDestroyProgram");
    load(log_size_, "nvrtcGetProgramLogSize");
    load(log_, "nvrtcGetProgramLog");
    load(cubin_size_, "nvrtcGetCUBINSize");
  }

  bool found() const { return library_ != nullptr; }

  struct Result {
    bool compiled;
    std::size_t cubin_bytes;
    std::string log;
  };

  Result compile(const std::string& source, const std::string& architecture) const {
    std::vector<std::string> names, texts;
    for (const char* header : kHeaders) {
      names.push_back(std::string("shared/") + header);
      texts.push_back(shared_text(header));
    }
    const auto pointers = [](const std::vector<std::string>& strings) {
      std::vector<const char*> result;
      for (const std::string& s : strings) result.push_back(s.c_str());
      return result;
    };
    Program program = nullptr;
    EXPECT_EQ(create_(&program, source.c_str(), "probe.cu", static_cast<int>(texts.size()), pointers(texts).data(),
                      pointers(names).data()),
              0);
    const std::vector<std::string> options{"--gpu-architecture=" + architecture, "-std=c++20", "-default-device",
                                           "--ptxas-options=-v"};
    Result result{};
    result.compiled = compile_(program, static_cast<int>(options.size()), pointers(options).data()) == 0;
    std::size_t bytes = 0;
    EXPECT_EQ(log_size_(program, &bytes), 0);
    result.log.resize(bytes);
    EXPECT_EQ(log_(program, result.log.data()), 0);
    if (result.compiled) {
      EXPECT_EQ(cubin_size_(program, &result.cubin_bytes), 0);
    }
    destroy_(&program);
    return result;
  }

 private:
  using Program = void*;

  template <class Function> void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    ASSERT_NE(function, nullptr) << name;
  }

  void* library_ = nullptr;  // stays open: NVRTC does not survive being unloaded
  int (*create_)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*compile_)(Program, int, const char* const*) = nullptr;
  int (*destroy_)(Program*) = nullptr;
  int (*log_size_)(Program, std::size_t*) = nullptr;
  int (*log_)(Program, char*) = nullptr;
  int (*cubin_size_)(Program, std::size_t*) = nullptr;
};

constexpr const char* kProbe = R"(
#include "shared/backward_args.h"
#include "shared/decode_args.h"
#include "shared/decode_line.h"
#include "shared/forward_args.h"
#include "shared/merge.h"
#include "shared/status.h"
#include "shared/tile_order.h"

namespace narrows {

struct Math {
  static float multiply(float a, float b) { return __fmul_rn(a, b); }
  static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static float exp2(float x) { return exp2f(x); }
  static float log2(float x) { return log2f(x); }
  static float tanh(float x) { return tanhf(x); }
};

static_assert(visible_pairs(make_mask(-1, -1, true, 0), 5, 2, 2 - 5) == 3);
static_assert(philox4x32_10<PhiloxMath>(PhiloxBlock<u32>{{0, 0, 0, 0}}, 0, 0).words[0] == 0x6627e8d5u);
static_assert(fused_units<float>(-0.5).sign == -1.f);

extern "C" __global__ void probe_mask(Mask mask, i64 sq, i64 sk, i64 shift, i64* out) {
  const i64 row = blockIdx.x * 64ll, key = threadIdx.x * 64ll;
  const Range keys = visible_keys(mask, row + shift, sk);
  const Range queries = visible_queries(mask, key, sq, shift);
  const Range key_hull = key_range(mask, {row, row + 64}, shift, sk);
  const Range query_hull = query_range(mask, {key, key + 64}, sq, shift);
  const TileClass tile = tile_class(mask, {row, row + 64}, {key, key + 64}, shift, sk);
  out[row + key] = keys.begin + keys.end + length(queries) + length(key_hull) + length(query_hull) +
                   static_cast<int>(tile) + visible(mask, row + shift, key, sk);
}

extern "C" __global__ void probe_pairs(Mask mask, i64 sq, i64 sk, i64 shift, i64* out) {
  out[threadIdx.x] = visible_pairs(mask, sq, sk, shift + threadIdx.x);
}

extern "C" __global__ void probe_bounds(Mask mask, RowBounds bounds, i64 sq, i64 sk, i64 shift, i64* out) {
  const Range keys = row_keys(mask, bounds, threadIdx.x, shift, sk);
  const Range hull = key_range(mask, bounds, {threadIdx.x, sq}, shift, sk);
  out[threadIdx.x] = length(keys) + length(hull) + visible_pairs(mask, bounds, sq, sk, shift);
}

extern "C" __global__ void probe_softmax(Units<float> units, ScoreRules<float> rules, const float* s, float* out) {
  const float x = logit<Math>(s[threadIdx.x], rules, s[1], s[2]);
  const Reference<float> old = reference_of<Math>(units, s[3]), reference = reference_of<Math>(units, max_of(s[3], x));
  const float weight = exp2f(weight_exponent<Math>(units, reference, x));
  const float sum = s[4] * exp2f(rescale_exponent<Math>(units, old, reference)) + weight;
  const float lse = log_sum_exp<Math>(units, reference, sum);
  const float p = exp2f(probability_exponent<Math>(backward_reference<Math>(units, lse), x));
  out[threadIdx.x] = p + normalizer(sum) * softcap_derivative(tanhf(x));
}

extern "C" __global__ void probe_merge(Units<float> units, const float* lse, i64 parts, const float* o, float* out) {
  const Merge<float> merge = merge_of<Math>(lse + threadIdx.x, parts, 32, lse[0]);
  float sum = merged_lse<Math>(merge);
  for (i64 part = 0; part < parts; ++part) sum += contribution(part_weight<Math>(merge, lse[part]), o[part]);
  const RunningSum<float> left{reference_of<Math>(units, o[0]), o[1]}, right{reference_of<Math>(units, o[2]), o[3]};
  out[threadIdx.x] = sum + joined<Math>(units, left, right).row.sum;
}

extern "C" __global__ void probe_line(LineTotals totals, i32 blocks, i32 asked, i32 fixed_split, i32* out) {
  const Cutting cutting = cutting_of(totals, blocks, asked, fixed_split);
  const Cut cut = cut_of(cutting, totals.longest);
  const Deal deal = deal_of(units_of(totals, cutting), blocks);
  const PartSlots slots = cutting.even ? stretch_slots(deal, deal.start(blocks / 2), cut.pieces) : unit_slots(blocks, cut.pieces);
  out[threadIdx.x] = slots.slot(static_cast<i32>(threadIdx.x)) + slots.count;
}

extern "C" __global__ void probe_dropout(DropoutRule rule, u32* out) {
  out[threadIdx.x] = keep_bits8(rule, 1, 2, blockIdx.x, threadIdx.x) + kept(rule, 1, 2, blockIdx.x, threadIdx.x) +
                     static_cast<u32>(keep_factor<float>(rule));
}

}  // namespace narrows
)";

class NvrtcArchitecture : public testing::TestWithParam<const char*> {};

TEST_P(NvrtcArchitecture, takes_every_header_and_keeps_it_in_registers) {
  const Nvrtc nvrtc;
  if (!nvrtc.found()) GTEST_SKIP() << "no libnvrtc: neither NARROWS_NVRTC nor the loader's path names one";
  const Nvrtc::Result result = nvrtc.compile(kProbe, GetParam());
  ASSERT_TRUE(result.compiled) << result.log;
  EXPECT_GT(result.cubin_bytes, 1000u);
  EXPECT_EQ(result.log.find("warning"), std::string::npos) << result.log;
  const std::regex frame("([0-9]+) bytes stack frame, ([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads");
  int kernels = 0;
  for (std::sregex_iterator i(result.log.begin(), result.log.end(), frame), end; i != end; ++i, ++kernels) {
    EXPECT_EQ(i->str(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") << result.log;
  }
  EXPECT_GE(kernels, 5) << result.log;
}

INSTANTIATE_TEST_SUITE_P(Shared, NvrtcArchitecture, testing::Values("sm_80", "sm_90a"));

}  // namespace
}  // namespace narrows
