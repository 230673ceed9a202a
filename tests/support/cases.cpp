#include "tests/support/cases.hpp"

#include <nlohmann/json.hpp>

#include <fstream>
#include <stdexcept>

namespace narrows::test {
namespace {

using Json = nlohmann::json;

struct Entry {
  Json json;
  DType dtype;
};

DType dtype_named(const std::string& text) {
  for (const DType dtype : {DType::fp16, DType::bf16, DType::fp32, DType::fp64})
    if (narrows::name(dtype) == text) return dtype;
  throw std::runtime_error("cases.jsonl: unknown dtype " + text);
}

/// A misspelt key would make a case test less than it says.
void check_keys(const Json& json) {
  static const std::vector<std::string> kKnown{"id",           "note",      "families", "dtypes", "b",
                                               "sq",           "sk",        "h",        "hk",     "d",
                                               "dv",           "causal",    "shift",    "window", "chunk",
                                               "scale",        "softcap",   "alibi",    "bias",   "mask",
                                               "mask_kind",    "sinks",     "layout",   "values", "cu_seqlens_q",
                                               "cu_seqlens_k", "seqused_q", "seqused_k"};
  for (const auto& [key, value] : json.items())
    if (std::find(kKnown.begin(), kKnown.end(), key) == kKnown.end())
      throw std::runtime_error("cases.jsonl: unknown key " + key + " in " + json.dump());
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> table = [] {
    std::ifstream lines(NARROWS_SOURCE_DIR "/tests/cases.jsonl");
    if (!lines) throw std::runtime_error("tests/cases.jsonl cannot be read");
    std::vector<Entry> read;
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      check_keys(json);
      for (const std::string dtype : json.at("dtypes")) read.push_back({json, dtype_named(dtype)});
    }
    return read;
  }();
  return table;
}

Dims dims(const Json& json) {
  Dims shape;
  for (const std::int64_t size : json) shape.push_back(size);
  return shape;
}

/// Axes of `shape` outermost first, and a gap, by the layout's name.
Arrangement arrangement(const std::string& layout, std::size_t rank) {
  if (layout == "gaps") return {.order = {}, .gap = 5};
  if (layout == "bhsd") return {.order = rank == 4 ? Dims{0, 2, 1, 3} : Dims{1, 0, 2}, .gap = 0};
  if (layout == "transposed") return {.order = rank == 4 ? Dims{3, 1, 0, 2} : Dims{2, 0, 1}, .gap = 3};
  return {};
}

Array make_array(DType dtype, const Dims& shape, const std::string& layout) {
  return Array(dtype, shape, arrangement(layout, shape.rank()));
}

Attention make_call(const Json& json, DType dtype, const std::string& layout) {
  const std::int64_t sq = json.at("sq"), sk = json.at("sk"), h = json.at("h"), hk = json.at("hk"), d = json.at("d"),
                     dv = json.at("dv");
  const bool packed_q = json.contains("cu_seqlens_q"), packed_k = json.contains("cu_seqlens_k");
  const std::int64_t b = json.value("b", std::int64_t{0});
  const auto rows = [&](bool packed, std::int64_t length, std::int64_t heads, std::int64_t width) {
    return packed ? Dims{length, heads, width} : Dims{b, length, heads, width};
  };
  Attention call;
  call.q = make_array(dtype, rows(packed_q, sq, h, d), layout);
  call.k = make_array(dtype, rows(packed_k, sk, hk, d), layout);
  call.v = make_array(dtype, rows(packed_k, sk, hk, dv), layout);
  call.o = make_array(dtype, rows(packed_q, sq, h, dv), layout);
  const DType lse = dtype == DType::fp64 ? DType::fp64 : DType::fp32;
  call.lse = make_array(lse, packed_q ? Dims{h, sq} : Dims{b, h, sq}, layout == "gaps" ? layout : "");
  return call;
}

void fill(Attention& call, const Json& json) {
  if (json.value("values", "gaussian") == "structured") {
    call.q.fill_structured(0.1);
    call.k.fill_structured(1.3);
    call.v.fill_structured(2.9);
  } else {
    call.q.fill_gaussian(11);
    call.k.fill_gaussian(12);
    call.v.fill_gaussian(13);
  }
}

/// Random booleans, or false on the first keys of the second batch row.
void fill_mask(Array& mask, const std::string& kind) {
  Gaussian random(21);
  const std::size_t rank = mask.shape().rank();
  mask.fill([&](const Dims& at) {
    if (kind == "left_padding") return at[0] == 0 || at[rank - 1] >= mask.shape()[rank - 1] * 3 / 4 ? 1.0 : 0.0;
    return random.uniform() < 0.6 ? 1.0 : 0.0;
  });
}

void add_lengths(Case& made, const Json& json) {
  Options& options = made.call.options;
  const auto add = [&](const char* key, Tensor& tensor) {
    if (!json.contains(key)) return;
    made.arrays.push_back(int32_array(json.at(key).get<std::vector<double>>()));
    tensor = made.arrays.back();
  };
  add("cu_seqlens_q", options.cu_seqlens_q);
  add("cu_seqlens_k", options.cu_seqlens_k);
  add("seqused_q", options.seqused_q);
  add("seqused_k", options.seqused_k);
  add("shift", options.shift);
}

void add_rules(Case& made, const Json& json) {
  Options& options = made.call.options;
  const std::string causal = json.value("causal", "none");
  options.causal = causal == "bottom_right" ? Causal::bottom_right
                   : causal == "top_left"   ? Causal::top_left
                                            : Causal::none;
  if (json.contains("window")) options.window = {json["window"].at(0), json["window"].at(1)};
  options.chunk = json.value("chunk", std::int64_t{0});
  options.softcap = json.value("softcap", 0.0);
  if (json.contains("scale")) options.scale = json["scale"].get<double>();
  const auto add = [&](Array array, Tensor& tensor) {
    made.arrays.push_back(std::move(array));
    tensor = made.arrays.back();
  };
  const std::int64_t h = json.at("h");
  if (json.contains("alibi")) {
    Array slopes(DType::fp32, json["alibi"] == "bh" ? Dims{json.at("b").get<std::int64_t>(), h} : Dims{h});
    slopes.fill([](const Dims& at) { return 0.5 / static_cast<double>(1 + at[0] + at[at.rank() - 1]); });
    add(std::move(slopes), options.alibi_slopes);
  }
  if (json.contains("bias")) add(std::move(Array(DType::fp32, dims(json["bias"])).fill_gaussian(31)), options.bias);
  if (json.contains("mask")) {
    Array mask(DType::boolean, dims(json["mask"]));
    fill_mask(mask, json.value("mask_kind", "random"));
    add(std::move(mask), options.mask);
  }
  if (json.value("sinks", false)) add(std::move(Array(DType::fp32, {h}).fill_gaussian(41)), options.sinks);
}

}  // namespace

std::string Case::name() const { return id + " " + std::string(narrows::name(dtype)) + ": " + note; }

std::size_t case_count() { return entries().size(); }

Case make_case(std::size_t index) {
  const auto& [json, dtype] = entries().at(index);
  Case made;
  made.id = json.at("id");
  made.note = json.at("note");
  made.layout = json.value("layout", "");
  made.families = json.at("families").get<std::vector<std::string>>();
  made.dtype = dtype;
  made.call = make_call(json, dtype, made.layout);
  fill(made.call, json);
  add_lengths(made, json);
  add_rules(made, json);
  return made;
}

}  // namespace narrows::test
