// narrows.h over narrows.hpp: the same functions, their results as C structs.
#include "api/c_boundary.hpp"
#include "api/c_structs.hpp"

#include <array>
#include <cstdlib>
#include <utility>

namespace narrows::boundary {
namespace {

constexpr std::size_t kTextSize = 4096;

// A plain array: storing a text allocates nothing, so that "out of memory" can always be told. Longer texts end in "...".
thread_local std::array<char, kTextSize> last_error_text{};

constexpr std::size_t kFirstExplanation = 144;  // bytes in release 0.1

std::string lines(const std::vector<std::string>& parts) {
  std::string joined;
  for (const std::string& part : parts) joined += (joined.empty() ? "" : "\n") + part;
  return joined;
}

void* allocate(std::size_t bytes) {
  void* memory = std::malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}

/// Puts the strings one behind the other into one allocation.
void store_strings(narrows_explanation& target, const Explanation& source) {
  const std::string refused = lines(source.refused);
  const std::string everything = source.text();
  const std::array<std::pair<const char**, std::string_view>, 6> strings{{{&target.problem, source.problem},
                                                                          {&target.family, source.family},
                                                                          {&target.plan, source.plan},
                                                                          {&target.refused, refused},
                                                                          {&target.limited_by, source.limited_by},
                                                                          {&target.text, everything}}};
  std::size_t bytes = 0;
  for (const auto& [slot, string] : strings) bytes += string.size() + 1;
  char* next = static_cast<char*>(allocate(bytes));
  target.memory = next;
  for (const auto& [slot, string] : strings) {
    *slot = next;
    next = std::copy(string.begin(), string.end(), next);
    *next++ = '\0';
  }
}

narrows_explanation explanation_from(const Explanation& source) {
  narrows_explanation target = narrows_explanation_default();
  target.visible_pairs = source.visible_pairs;
  target.flops = source.flops;
  target.fused_bytes = source.fused_bytes;
  target.three_kernel_bytes = source.three_kernel_bytes;
  target.fused_memory = source.fused_memory;
  target.three_kernel_memory = source.three_kernel_memory;
  target.fused_intensity = source.fused_intensity;
  target.three_kernel_intensity = source.three_kernel_intensity;
  target.predicted_seconds = source.predicted_seconds;
  target.three_kernel_seconds = source.three_kernel_seconds;
  target.fused_l2_bytes = source.fused_l2_bytes;
  store_strings(target, source);
  return target;
}

std::string text_of(const Info& source) {
  std::string joined = text("version: ", source.version, "\ncpu: ", source.cpu,
                            "\ninstruction_set: ", source.instruction_set, "\nthreads: ", source.threads, "\n");
  for (const FamilyInfo& family : source.families)
    joined += text(family.name, ": ", family.available ? "available" : "not available", ", ", family.detail, "\n");
  return joined;
}

void store_bytes(std::int64_t* target, std::int64_t bytes) {
  if (!target) refuse_value("bytes", "NULL", "this argument is required");
  *target = bytes;
}

char* copy_of(const std::string& source) {
  char* copy = static_cast<char*>(allocate(source.size() + 1));
  std::memcpy(copy, source.c_str(), source.size() + 1);
  return copy;
}

}  // namespace

const char* last_error() noexcept { return last_error_text.data(); }

void set_last_error(std::string_view text) noexcept {
  constexpr std::string_view kCut = "...";
  const bool fits = text.size() < kTextSize;
  char* end = std::copy_n(text.data(), fits ? text.size() : kTextSize - 1 - kCut.size(), last_error_text.data());
  if (!fits) end = std::copy(kCut.begin(), kCut.end(), end);
  *end = '\0';
}

}  // namespace narrows::boundary

using namespace narrows::boundary;

narrows_status narrows_forward(const narrows_inputs* in, const narrows_outputs* out, const narrows_options* options) {
  return guard([&] { narrows::forward(inputs_from(in), outputs_from(out), options_from(options)); });
}

narrows_status narrows_prepare(const narrows_inputs* in, const narrows_options* options) {
  return guard([&] { narrows::prepare(inputs_from(in), options_from(options)); });
}

narrows_status narrows_prepare_backward(const narrows_inputs* in, const narrows_options* options) {
  return guard([&] { narrows::prepare_backward(inputs_from(in), options_from(options)); });
}

narrows_status narrows_backward(const narrows_backward_inputs* in, const narrows_gradients* out,
                                const narrows_options* options) {
  return guard([&] { narrows::backward(backward_inputs_from(in), gradients_from(out), options_from(options)); });
}

narrows_status narrows_merge(const narrows_outputs* parts, size_t count, const narrows_outputs* out,
                             const narrows_tensor* sinks, void* stream) {
  return guard([&] {
    narrows::merge(parts_from("parts", parts, count), outputs_from(out), optional_tensor_from("sinks", sinks), stream);
  });
}

narrows_status narrows_merge_backward(const narrows_outputs* parts, size_t count, const narrows_tensor* dout,
                                      const narrows_tensor* dlse, const narrows_merge_gradients* out,
                                      const narrows_tensor* sinks, void* stream) {
  return guard([&] {
    const OwnedMergeGradients owned = merge_gradients_from(out, count);
    narrows::merge_backward(parts_from("parts", parts, count), optional_tensor_from("dout", dout),
                            optional_tensor_from("dlse", dlse), owned.gradients, optional_tensor_from("sinks", sinks),
                            stream);
  });
}

narrows_status narrows_workspace_size(const narrows_inputs* in, const narrows_options* options, int64_t* bytes) {
  return guard([&] { store_bytes(bytes, narrows::workspace_size(inputs_from(in), options_from(options))); });
}

narrows_status narrows_backward_workspace_size(const narrows_inputs* in, const narrows_options* options,
                                               int64_t* bytes) {
  return guard([&] { store_bytes(bytes, narrows::backward_workspace_size(inputs_from(in), options_from(options))); });
}

narrows_status narrows_explain(const narrows_inputs* in, const narrows_options* options,
                               narrows_explanation* explanation) {
  return guard([&] {
    check_struct(explanation, "explanation", kFirstExplanation);
    write_struct(explanation, explanation_from(narrows::explain(inputs_from(in), options_from(options))));
  });
}

narrows_status narrows_info(char** text) {
  return guard([&] {
    if (!text) narrows::refuse_value("text", "NULL", "this argument is required");
    *text = copy_of(text_of(narrows::info()));
  });
}

void narrows_free(void* memory) { std::free(memory); }

const char* narrows_last_error(void) { return last_error(); }

const char* narrows_version(void) { return narrows::version().data(); }

const char* narrows_name(narrows_dtype dtype) {
  return narrows_item_size(dtype) ? narrows::name(static_cast<narrows::DType>(dtype - narrows_fp16)).data() : nullptr;
}

size_t narrows_item_size(narrows_dtype dtype) {
  if (dtype < narrows_fp16 || dtype > narrows_boolean) return 0;
  return narrows::item_size(static_cast<narrows::DType>(dtype - narrows_fp16));
}
