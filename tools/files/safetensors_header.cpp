#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"
#include "tools/files/safetensors.hpp"

namespace narrows::files {
namespace {

constexpr std::array<std::pair<std::string_view, DType>, 8> kDTypes{{{"F16", DType::fp16},
                                                                     {"BF16", DType::bf16},
                                                                     {"F32", DType::fp32},
                                                                     {"F64", DType::fp64},
                                                                     {"I32", DType::int32},
                                                                     {"I64", DType::int64},
                                                                     {"U8", DType::uint8},
                                                                     {"BOOL", DType::boolean}}};

/// Takes the events of the JSON parser and refuses the first that the format does not have. No tree of the document is
/// built, so a hostile header costs no more memory than the tensors that it names, and duplicate keys are seen.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(std::string_view file) : file_(file) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside)
      place_ = Place::file;
    else if (place_ == Place::file)
      place_ = key_ == kSafetensorsMetadata ? Place::metadata : Place::tensor;
    else
      refuse("an object");
    return true;
  }

  bool key(std::string& name) override {
    key_ = name;
    if (place_ == Place::tensor) {
      if (name != "dtype" && name != "shape" && name != "data_offsets")
        fail(subject(), fmt::format("key {} is not one of 'dtype', 'shape', 'data_offsets'", printable(name)));
    } else if (place_ == Place::metadata) {
      if (header_.metadata.count(name) != 0)
        fail(file_, fmt::format("metadata key {} is given twice", printable(name)));
    } else {
      start_tensor(name);
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata)
      header_.metadata.emplace(key_, value);
    else if (place_ == Place::tensor && key_ == "dtype")
      set_dtype(value);
    else
      refuse("a string");
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || key_ == "dtype") refuse("an array");
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    if ((place_ == Place::shape ? has_shape_ : has_offsets_)) fail_twice();
    (place_ == Place::shape ? has_shape_ : has_offsets_) = true;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::shape)
      add_size(value);
    else if (place_ == Place::offsets)
      add_offset(value);
    else
      refuse("a number");
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) finish_tensor();
    place_ = place_ == Place::file ? Place::outside : Place::file;
    return true;
  }

  bool null() override { refuse("null"); }
  bool boolean(bool value) override { refuse(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) override { refuse(fmt::format("the negative number {}", value)); }
  bool number_float(double, const std::string& text) override { refuse("the number " + printable(text)); }
  bool binary(binary_t&) override { refuse("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail(file_, fmt::format("header is not valid JSON at its byte {}", position == 0 ? 0 : position - 1));
  }

 private:
  enum class Place { outside, file, metadata, tensor, shape, offsets };

  std::string subject() const { return subject_of(file_, "tensor", tensor_.name); }

  void start_tensor(const std::string& name) {
    if (!names_.insert(name).second) fail(subject_of(file_, "tensor", name), "the name is given twice");
    if (name == kSafetensorsMetadata) return;
    require_name(file_, "tensor", name);
    tensor_ = {};
    tensor_.name = name;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    rank_ = offsets_ = 0;
  }

  void set_dtype(const std::string& value) {
    if (has_dtype_) fail_twice();
    const auto* const found =
        std::find_if(kDTypes.begin(), kDTypes.end(), [&value](const auto& known) { return known.first == value; });
    if (found == kDTypes.end())
      fail(subject(), fmt::format("dtype {} is not read; F16 BF16 F32 F64 I32 I64 U8 BOOL are", printable(value)));
    tensor_.dtype = found->second;
    has_dtype_ = true;
  }

  void add_size(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      fail(subject(), fmt::format("shape: size {} leaves 63 bits", value));
    if (rank_++ < Dims::kMaxRank) tensor_.shape.push_back(static_cast<std::int64_t>(value));
  }

  void add_offset(std::uint64_t value) {
    if (offsets_ == 0) tensor_.begin = value;
    if (offsets_ == 1) tensor_.end = value;
    ++offsets_;
  }

  void finish_tensor() {
    if (!has_dtype_) fail(subject(), "no dtype");
    if (!has_shape_) fail(subject(), "no shape");
    if (!has_offsets_) fail(subject(), "no data_offsets");
    if (rank_ > Dims::kMaxRank)
      fail(subject(), fmt::format("shape has {} dimensions; at most {} are read", rank_, Dims::kMaxRank));
    if (offsets_ != 2) fail(subject(), fmt::format("data_offsets has {} numbers; it is [begin, end]", offsets_));
    if (tensor_.begin > tensor_.end)
      fail(subject(), fmt::format("data_offsets [{}, {}] end before they begin", tensor_.begin, tensor_.end));
    const auto needed = static_cast<std::uint64_t>(dense_bytes(subject(), tensor_.shape, tensor_.dtype));
    if (tensor_.end - tensor_.begin != needed)
      fail(subject(),
           fmt::format("data_offsets [{}, {}] hold {} bytes; shape {} of {} needs {}", tensor_.begin, tensor_.end,
                       tensor_.end - tensor_.begin, text_of(tensor_.shape), safetensors_dtype(tensor_.dtype), needed));
    header_.entries.push_back(std::move(tensor_));
  }

  [[noreturn]] void fail_twice() { fail(subject(), fmt::format("{} is given twice", key_)); }

  [[noreturn]] void refuse(std::string_view found) {
    switch (place_) {
      case Place::outside: fail(file_, fmt::format("header is {}; it is a JSON object", found));
      case Place::file: fail(subject_of(file_, "tensor", key_), fmt::format("is {}; an object describes it", found));
      case Place::metadata: fail(file_, fmt::format("metadata {} is {}; it is a string", printable(key_), found));
      case Place::tensor:
        fail(subject(), fmt::format("{} is {}; it is {}", key_, found, key_ == "dtype" ? "a string" : "an array"));
      case Place::shape:
      case Place::offsets: break;
    }
    fail(subject(), fmt::format("{} holds {}; it holds whole numbers from 0", key_, found));
  }

  std::string file_, key_;
  Place place_ = Place::outside;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  SafetensorsEntry tensor_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::size_t rank_ = 0, offsets_ = 0;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view file, std::string_view json) {
  HeaderReader reader(file);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  return reader.take();
}

std::string_view safetensors_dtype(DType dtype) {
  return std::find_if(kDTypes.begin(), kDTypes.end(), [dtype](const auto& known) { return known.second == dtype; })
      ->first;
}

}  // namespace narrows::files
