#include "call.hpp"

#include <array>
#include <utility>

namespace narrows::python {
namespace {

constexpr std::pair<std::string_view, Tensor BackwardInputs::*> kInputs[] = {
    {"q", &BackwardInputs::q},       {"k", &BackwardInputs::k},       {"v", &BackwardInputs::v},
    {"k_cache", &BackwardInputs::k}, {"v_cache", &BackwardInputs::v}, {"o", &BackwardInputs::o},
    {"lse", &BackwardInputs::lse},   {"dout", &BackwardInputs::dout}, {"dlse", &BackwardInputs::dlse},
};
constexpr std::pair<std::string_view, Tensor Gradients::*> kGradients[] = {
    {"dq", &Gradients::dq},       {"dk", &Gradients::dk},           {"dv", &Gradients::dv},
    {"dbias", &Gradients::dbias}, {"dslopes", &Gradients::dslopes}, {"dsinks", &Gradients::dsinks},
};
constexpr std::pair<std::string_view, Number Options::*> kNumbers[] = {{"seed", &Options::seed},
                                                                       {"offset", &Options::offset}};
constexpr std::pair<std::string_view, Tensor Options::*> kOptions[] = {
    {"alibi_slopes", &Options::alibi_slopes},
    {"bias", &Options::bias},
    {"sinks", &Options::sinks},
    {"shift", &Options::shift},
    {"mask", &Options::mask},
    {"key_begin", &Options::key_begin},
    {"key_end", &Options::key_end},
    {"cu_seqlens_q", &Options::cu_seqlens_q},
    {"cu_seqlens_k", &Options::cu_seqlens_k},
    {"seqused_q", &Options::seqused_q},
    {"seqused_k", &Options::seqused_k},
    {"cache_seqlens", &Options::cache_seqlens},
    {"block_table", &Options::block_table},
    {"cache_batch_idx", &Options::cache_batch_idx},
    {"leftpad", &Options::leftpad},
    {"k_new", &Options::k_new},
    {"v_new", &Options::v_new},
    {"cu_seqlens_k_new", &Options::cu_seqlens_k_new},
    {"rotary_cos", &Options::rotary_cos},
    {"rotary_sin", &Options::rotary_sin},
    {"rotary_base", &Options::rotary_base},
    {"workspace", &Options::workspace},
    {"status", &Options::status},
};

template <class Owner, class Field, std::size_t N>
Field* find(Owner& owner, const std::pair<std::string_view, Field Owner::*> (&table)[N], std::string_view name) {
  for (const auto& [key, member] : table)
    if (key == name) return &(owner.*member);
  return nullptr;
}

}  // namespace

void Call::set_operand(nb::object object) {
  const Operand& operand = nb::cast<const Operand&>(object);
  const std::string& name = operand.name();
  Tensor* field = find(tensors_, kInputs, name);
  if (!field) field = find(gradients_, kGradients, name);
  if (!field) field = find(options_, kOptions, name);
  if (field) {
    *field = operand.tensor();
  } else if (Number* number = find(options_, kNumbers, name)) {
    *number = Number(operand.tensor());
  } else {
    throw Error(ErrorCode::internal, name + ": is no tensor argument");
  }
  operands_[name] = std::move(object);
}

void Call::set_number(std::string_view name, std::uint64_t value) {
  Number* number = find(options_, kNumbers, name);
  if (!number) throw Error(ErrorCode::internal, std::string(name) + ": is no number argument");
  *number = Number(value);
}

void Call::set_family(std::string name) {
  family_ = std::move(name);
  options_.family = family_;
}

}  // namespace narrows::python
