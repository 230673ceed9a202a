// Calls on a GPU as far as a plan of family sm80 needs them: addresses of nothing stand for its memory.
#pragma once

#include "core/error.hpp"
#include "cuda/planned.hpp"
#include "plan/plan.hpp"

#include <array>
#include <stdexcept>
#include <variant>

namespace narrows::test {

inline constexpr Device kPlannedGpu{DeviceKind::cuda, 0};
inline constexpr std::array kGpuArchitectures{"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"};
inline constexpr std::array kGpuDTypes{DType::fp16, DType::bf16, DType::fp32};
inline constexpr std::array<i64, 6> kChipWidths{32, 64, 96, 128, 192, 256};

inline Tensor on_gpu(DType dtype, const Dims& shape, const Dims& strides = {}, std::uintptr_t address = 1 << 20) {
  return {reinterpret_cast<void*>(address), dtype, shape, strides, kPlannedGpu};
}

/// Dense q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv).
struct GpuSizes {
  DType dtype = DType::bf16;
  i64 b = 2, sq = 300, sk = 500, h = 4, hk = 2, d = 64, dv = 64;

  Inputs inputs() const {
    return {on_gpu(dtype, {b, sq, h, d}), on_gpu(dtype, {b, sk, hk, d}), on_gpu(dtype, {b, sk, hk, dv})};
  }
};

inline std::variant<Plan, Refusal> consider(const Call& call, const Machine& machine) {
  return consider_sm80(call.problem, work(call), machine);
}

inline Plan plan_of(const Call& call, const Machine& machine) {
  const std::variant<Plan, Refusal> answer = consider(call, machine);
  if (const Refusal* reason = std::get_if<Refusal>(&answer)) throw std::runtime_error(*reason);
  return std::get<Plan>(answer);
}

inline Plan plan_of(const GpuSizes& sizes, const Options& options = {},
                    const Machine& machine = cuda::machine_of("sm_90a")) {
  return plan_of(make_explained(sizes.inputs(), options), machine);
}

}  // namespace narrows::test
