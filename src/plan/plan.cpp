#include "plan/plan.hpp"

#include "core/error.hpp"

#include <array>
#include <optional>

namespace narrows {
namespace {

constexpr std::array kFamilies{Family{"sm90", DeviceKind::cuda, consider_sm90},
                               Family{"sm80", DeviceKind::cuda, consider_sm80},
                               Family{"cpu", DeviceKind::cpu, consider_cpu}};

std::string joined(std::span<const std::string> parts) {
  std::string line;
  for (const std::string& part : parts) line += (line.empty() ? "" : "; ") + part;
  return line;
}

std::string names() {
  std::string line;
  for (const Family& family : kFamilies) line += text(line.empty() ? "" : ", ", family.name);
  return line;
}

}  // namespace

std::span<const Family> families() { return kFamilies; }

i64 Plan::workspace_bytes() const {
  i64 total = 0;
  for (const Region& region : workspace) total = saturating_add(total, region.bytes);
  return total;
}

i64 Plan::lent_workspace_bytes() const {
  const i64 bytes = workspace_bytes();
  return bytes == 0 ? 0 : saturating_add(bytes, kScratchAlignment - 1);
}

std::string Plan::text() const {
  std::string lines = narrows::text("family ", family, "\n");
  if (!instruction_set.empty()) lines += narrows::text("instruction set ", instruction_set, "\n");
  lines += warps ? gpu_text() : cpu_text();
  for (const Region& region : workspace)
    if (region.bytes) lines += narrows::text("scratch ", region.name, " ", region.bytes, " bytes\n");
  return lines;
}

std::string Plan::cpu_text() const {
  std::string lines = narrows::text("threads ", threads, "\nquery block ", query_block, "\nkey block ", key_block,
                                    "\nkv heads at once ", heads_at_once, "\n");
  if (key_chunk) lines += narrows::text("key chunk ", key_chunk, "\npartial sums of dQ ", partials, "\n");
  if (reads_in_place)
    lines += narrows::text("keys read where they lie, kv heads together ", heads_together, "\n");
  else if (!packs_ahead)
    lines += "keys packed by the task that reads them\n";
  if (keeps_kernel) lines += "batch_invariant: decoding takes the kernel of prefill\n";
  if (split_keys) lines += narrows::text("keys of a split ", split_keys, "\n");
  return lines;
}

std::string Plan::gpu_text() const {
  std::string lines =
      narrows::text("query block ", query_block, "\nkey block ", key_block, "\nhead dims on chip ", head_width, ", ",
                    value_width, "\nwarps ", warps, "\nthread blocks of a multiprocessor ", resident_blocks,
                    "\nshared memory of a thread block ", shared_bytes, " bytes\n");
  if (thread_blocks) lines += narrows::text("thread blocks that take tile after tile ", thread_blocks, "\n");
  if (value_slices > 1) lines += narrows::text("slices of V ", value_slices, "\n");
  if (column_warps > 1) lines += narrows::text("warps that share keys ", column_warps, "\n");
  if (stages) lines += narrows::text("stages of Q and dO ", stages, "\n");
  if (takes_turns) lines += "sums of dQ in the order of keys\n";
  if (copy_bytes >= 4) lines += narrows::text("copied ", copy_bytes, " bytes at a time\n");
  const bool gathers = copy_bytes == 0 || (copy_bytes == 2 && stages);
  if (copy_bytes == 2 && !gathers) lines += "copied 16 bytes at a time and shifted\n";
  if (gathers) lines += "copied element by element\n";
  if (split_keys) lines += narrows::text("keys of a split ", split_keys, "\n");
  if (decodes) lines += narrows::text("keys shared out by the device among ", blocks, " thread blocks\n");
  if (most_splits) lines += narrows::text("splits of a row's keys, at most ", most_splits, "\n");
  if (section > 1) lines += narrows::text("heads together ", section, "\n");
  return lines;
}

Choice choose(const Problem& problem, const Work& work, const Machine& machine, std::string_view forced) {
  std::optional<Plan> best;
  std::vector<std::string> refused;
  bool known = forced.empty();
  for (const Family& family : kFamilies) {
    if (!forced.empty() && family.name != forced) continue;
    known = true;
    if (family.device != problem.device.kind) {
      if (!forced.empty()) refused.push_back(text(family.name, ": the tensors are on ", problem.device));
      continue;
    }
    std::variant<Plan, Refusal> answer = family.consider(problem, work, machine);
    if (const Refusal* reason = std::get_if<Refusal>(&answer)) {
      refused.push_back(text(family.name, ": ", *reason));
    } else if (Plan& plan = std::get<Plan>(answer); !best || plan.prediction.seconds < best->prediction.seconds) {
      best = std::move(plan);
    }
  }
  if (!known) refuse_value("family", forced, text("must be one of: ", names()));
  if (!best && refused.empty()) refused.push_back(text("none of this build is for ", problem.device));
  if (!best)
    throw Error(ErrorCode::not_implemented, text("no family computes this (", problem.text(), "): ", joined(refused)));
  return {std::move(*best), std::move(refused)};
}

}  // namespace narrows
