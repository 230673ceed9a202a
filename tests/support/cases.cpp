#include "tests/support/cases.hpp"

#include "plan/plan.hpp"
#include "tests/support/row_bounds.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
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
  static const std::vector<std::string> kKnown{"id",
                                               "note",
                                               "families",
                                               "backward_families",
                                               "dtypes",
                                               "large",
                                               "b",
                                               "sq",
                                               "sk",
                                               "h",
                                               "hk",
                                               "d",
                                               "dv",
                                               "causal",
                                               "shift",
                                               "window",
                                               "chunk",
                                               "scale",
                                               "softcap",
                                               "alibi",
                                               "bias",
                                               "mask",
                                               "mask_kind",
                                               "intervals",
                                               "sinks",
                                               "layout",
                                               "values",
                                               "cu_seqlens_q",
                                               "cu_seqlens_k",
                                               "seqused_q",
                                               "seqused_k",
                                               "dropout",
                                               "seed",
                                               "origin",
                                               "num_splits",
                                               "batch_invariant",
                                               "cache_seqlens",
                                               "page_size",
                                               "leftpad",
                                               "cache_batch_idx",
                                               "new_keys",
                                               "cu_seqlens_k_new",
                                               "rotary",
                                               "rotary_pairs",
                                               "rotary_base"};
  for (const auto& [key, value] : json.items())
    if (std::find(kKnown.begin(), kKnown.end(), key) == kKnown.end())
      throw std::runtime_error("cases.jsonl: unknown key " + key + " in " + json.dump());
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> table = [] {
    std::ifstream lines(NARROWS_SOURCE_DIR "/tests/cases.jsonl");
    if (!lines) throw std::runtime_error("tests/cases.jsonl cannot be read");
    std::vector<Entry> read;
    const bool few = std::getenv("NARROWS_TEST_SMALL");
    std::size_t number = 0;
    for (std::string line; std::getline(lines, line); ++number) {
      const Json json = Json::parse(line);
      check_keys(json);
      if (few && json.contains("large")) continue;
      const Json& dtypes = json.at("dtypes");
      for (std::size_t at = 0; at < dtypes.size(); ++at)
        if (!few || number % dtypes.size() == at) read.push_back({json, dtype_named(dtypes[at])});
    }
    return read;
  }();
  return table;
}

DeviceKind device_of(const std::string& family) {
  for (const Family& known : families())
    if (known.name == family) return known.device;
  throw std::runtime_error("cases.jsonl: unknown family " + family);
}

/// fp64 is the CPU's alone; family sm90 computes in 16 bits.
bool concerns(const std::string& family, DType dtype, DeviceKind device) {
  if (family == "sm90" && dtype == DType::fp32) return false;
  return device_of(family) == device && (device == DeviceKind::cpu || dtype != DType::fp64);
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

/// A cache call's k and v; sk is the capacity of a cache row.
struct CacheShape {
  std::int64_t sequences = 0, rows = 0, pages_of_row = 0, page_size = 0;  // page size 0: not paged

  explicit CacheShape(const Json& json)
      : sequences(static_cast<std::int64_t>(json.at("cache_seqlens").size())),
        rows(sequences),
        page_size(json.value("page_size", std::int64_t{0})) {
    if (json.contains("cache_batch_idx"))
      for (const std::int64_t row : json["cache_batch_idx"]) rows = std::max(rows, row + 1);
    if (page_size) pages_of_row = (json.at("sk").get<std::int64_t>() + page_size - 1) / page_size + 1;
  }
  Dims dims(std::int64_t capacity, std::int64_t heads, std::int64_t width) const {
    return page_size ? Dims{rows * pages_of_row + 2, page_size, heads, width} : Dims{rows, capacity, heads, width};
  }
};

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
  const auto keys = [&](std::int64_t width) {
    return json.contains("cache_seqlens") ? CacheShape(json).dims(sk, hk, width) : rows(packed_k, sk, hk, width);
  };
  call.k = make_array(dtype, keys(d), layout);
  call.v = make_array(dtype, keys(dv), layout);
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

std::vector<std::int64_t> integers(const Json& json, const char* key, std::int64_t count, std::int64_t otherwise) {
  if (json.contains(key)) return json[key].get<std::vector<std::int64_t>>();
  return std::vector<std::int64_t>(static_cast<std::size_t>(count), otherwise);
}

Tensor keep(Case& made, Array array) { return made.arrays.emplace_back(std::move(array)); }

/// New keys of each sequence.
std::vector<std::int64_t> add_new_keys(Case& made, const Json& json, std::int64_t sequences) {
  Options& options = made.call.options;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(sequences), json.value("new_keys", std::int64_t{0}));
  const std::int64_t hk = json.at("hk");
  Dims shape{sequences, json.value("new_keys", std::int64_t{0}), hk, 0};
  if (json.contains("cu_seqlens_k_new")) {
    const std::vector<std::int64_t> bounds = integers(json, "cu_seqlens_k_new", 0, 0);
    for (std::size_t s = 0; s < counts.size(); ++s) counts[s] = bounds[s + 1] - bounds[s];
    shape = {bounds.back(), hk, 0};
  } else if (!json.contains("new_keys")) {
    return counts;
  }
  shape[shape.rank() - 1] = json.at("d");
  options.k_new = keep(made, std::move(Array(made.dtype, shape).fill_gaussian(61)));
  shape[shape.rank() - 1] = json.at("dv");
  options.v_new = keep(made, std::move(Array(made.dtype, shape).fill_gaussian(62)));
  return counts;
}

/// Slots that nobody fills hold NaN, entries of pages that nobody uses are out of range, and pages lie in no order.
void add_cache(Case& made, const Json& json) {
  if (!json.contains("cache_seqlens")) return;
  Attention& call = made.call;
  const CacheShape cache(json);
  const std::vector<std::int64_t> filled = integers(json, "cache_seqlens", 0, 0),
                                  pads = integers(json, "leftpad", cache.sequences, 0),
                                  fresh = add_new_keys(made, json, cache.sequences);
  std::vector<std::int64_t> row_of = integers(json, "cache_batch_idx", cache.sequences, 0);
  if (!json.contains("cache_batch_idx")) std::iota(row_of.begin(), row_of.end(), 0);
  Array table(DType::int32, {cache.rows, std::max<std::int64_t>(cache.pages_of_row, 1)});
  std::int64_t next = cache.rows * cache.pages_of_row + 1;
  const Array k = call.k, v = call.v;
  call.k.poison();
  call.v.poison();
  for (std::size_t s = 0; s < filled.size(); ++s)
    for (std::int64_t slot = pads[s]; slot < filled[s] + fresh[s]; ++slot) {
      Dims place{row_of[s], slot, 0, 0};
      if (cache.page_size) {
        const Dims entry{row_of[s], slot / cache.page_size};
        if (slot == pads[s] || slot % cache.page_size == 0) table.set(entry, static_cast<double>(next--));
        place = {static_cast<std::int64_t>(table[entry]), slot % cache.page_size, 0, 0};
      }
      for (const auto& [to, from] : {std::pair{&call.k, &k}, std::pair{&call.v, &v}})
        for (place[2] = 0; slot < filled[s] && place[2] < from->shape()[2]; ++place[2])
          for (place[3] = 0; place[3] < from->shape()[3]; ++place[3]) to->set(place, (*from)[place]);
    }
  if (cache.page_size) call.options.block_table = keep(made, std::move(table));
}

void add_rotary(Case& made, const Json& json) {
  if (!json.contains("rotary")) return;
  Options& options = made.call.options;
  const std::int64_t pairs = json.value("rotary_pairs", json.at("d").get<std::int64_t>() / 2);
  const Dims shape{json.at("sk").get<std::int64_t>() + json.at("sq").get<std::int64_t>() + 64, pairs};
  const auto angle = [&](const Dims& at) {
    return static_cast<double>(at[0]) * std::pow(100.0, -static_cast<double>(at[1]) / static_cast<double>(pairs));
  };
  options.rotary_cos =
      keep(made, std::move(Array(DType::fp32, shape).fill([&](const Dims& at) { return std::cos(angle(at)); })));
  options.rotary_sin =
      keep(made, std::move(Array(DType::fp32, shape).fill([&](const Dims& at) { return std::sin(angle(at)); })));
  options.rotary_interleaved = json["rotary"] == "interleaved";
}

void add_computation(Case& made, const Json& json) {
  Options& options = made.call.options;
  options.dropout = json.value("dropout", 0.0);
  options.seed = json.value("seed", std::uint64_t{0});
  if (json.contains("origin")) {
    const std::vector<std::int64_t> at = json["origin"];
    options.origin = {at.at(0), at.at(1), at.at(2), at.at(3), at.at(4)};
  }
  options.num_splits = json.value("num_splits", 0);
  options.batch_invariant = json.value("batch_invariant", false);
}

void add_lengths(Case& made, const Json& json) {
  Options& options = made.call.options;
  const auto add = [&](const char* key, Tensor& tensor) {
    if (!json.contains(key)) return;
    tensor = keep(made, int32_array(json.at(key).get<std::vector<double>>()));
  };
  add("cu_seqlens_q", options.cu_seqlens_q);
  add("cu_seqlens_k", options.cu_seqlens_k);
  add("seqused_q", options.seqused_q);
  add("seqused_k", options.seqused_k);
  add("shift", options.shift);
  add("cache_seqlens", options.cache_seqlens);
  add("leftpad", options.leftpad);
  add("cache_batch_idx", options.cache_batch_idx);
  add("cu_seqlens_k_new", options.cu_seqlens_k_new);
  add("rotary_base", options.rotary_base);
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
  const auto add = [&](Array array, Tensor& tensor) { tensor = keep(made, std::move(array)); };
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

/// documents: packed ones of rising lengths, rows and keys alike. prefix: causal, but for a first quarter of the keys that all
/// rows see. begin and end: one random bound alone, end the same for every batch row.
void add_intervals(Case& made, const Json& json) {
  if (!json.contains("intervals")) return;
  const std::string kind = json["intervals"];
  Options& options = made.call.options;
  const std::int64_t sk = json.at("sk");
  RandomBounds bounds(71, made.call.q.shape(), sk);
  if (kind == "documents") {
    bounds.fill_documents();
  } else if (kind == "prefix") {
    bounds.end.fill([&](const Dims& at) { return static_cast<double>(std::max(sk / 4, at[at.rank() - 1] + 1)); });
  } else if (kind != "random" && kind != "begin" && kind != "end") {
    throw std::runtime_error("cases.jsonl: unknown intervals " + kind);
  }
  if (kind != "end" && kind != "prefix") options.key_begin = keep(made, std::move(bounds.begin));
  if (kind != "begin") options.key_end = keep(made, std::move(bounds.end));
  if (kind == "end" && options.key_end.shape.rank() == 2) options.key_end.strides[0] = 0;
}

}  // namespace

std::string Case::name() const { return id + " " + std::string(narrows::name(dtype)) + ": " + note; }

std::size_t case_count() { return entries().size(); }

std::vector<std::string> case_families(std::size_t index, DeviceKind device, Operation operation) {
  const auto& [json, dtype] = entries().at(index);
  const bool backward = operation == Operation::backward;
  if (backward && json.contains("cache_seqlens")) return {};  // forward only
  const char* const key = backward && json.contains("backward_families") ? "backward_families" : "families";
  std::vector<std::string> named;
  for (const std::string family : json.at(key))
    if (concerns(family, dtype, device)) named.push_back(family);
  return named;
}

std::string case_label(std::size_t index) {
  return entries().at(index).json.at("id").get<std::string>() + " " + std::string(name(entries().at(index).dtype));
}

Case make_case(std::size_t index) {
  const auto& [json, dtype] = entries().at(index);
  Case made;
  made.id = json.at("id");
  made.note = json.at("note");
  made.layout = json.value("layout", "");
  made.families = case_families(index, DeviceKind::cpu);
  made.dtype = dtype;
  made.call = make_call(json, dtype, made.layout);
  fill(made.call, json);
  add_lengths(made, json);
  add_rules(made, json);
  add_intervals(made, json);
  add_cache(made, json);
  add_rotary(made, json);
  add_computation(made, json);
  return made;
}

Inputs inputs(const Case& row) {
  Inputs in = row.call.in();
  if (row.layout == "expanded") {  // all keys and values equal the first of each head
    in.k.strides[1] = in.v.strides[1] = 0;
  } else if (row.layout == "reversed") {
    for (Tensor* tensor : {&in.q, &in.k, &in.v}) {
      auto* last = static_cast<std::byte*>(tensor->data);
      for (std::size_t axis = 0; axis < tensor->shape.rank(); ++axis) {
        last += (tensor->shape[axis] - 1) * tensor->strides[axis] * static_cast<std::int64_t>(item_size(tensor->dtype));
        tensor->strides[axis] = -tensor->strides[axis];
      }
      tensor->data = last;
    }
  } else if (row.layout == "absurd_batch_stride") {
    for (Tensor* tensor : {&in.q, &in.k, &in.v}) tensor->strides[0] = std::numeric_limits<std::int64_t>::max();
  }
  return in;
}

}  // namespace narrows::test
