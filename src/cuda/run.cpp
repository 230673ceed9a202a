#include "cuda/run.hpp"

#include "core/error.hpp"
#include "core/status.hpp"
#include "cuda/backward.hpp"
#include "cuda/decode.hpp"
#include "cuda/driver.hpp"
#include "cuda/forward.hpp"

#include <optional>

namespace narrows::cuda {

void run(const Call& call, const Plan& plan, bool check) {
  const CurrentDevice current(call.problem.device.index);
  Buffers buffers = call.buffers;
  const Stream stream = static_cast<Stream>(buffers.stream);
  if (check && is_capturing(stream))
    refuse_value("check", "true",
                 "waits for the call, which a stream that is being captured cannot; read `status` later", "false");
  std::optional<DeviceMemory> own;
  if (check && !buffers.status) {
    own.emplace(static_cast<i64>(sizeof(CallStatus)), stream);
    buffers.status = static_cast<std::int32_t*>(own->data());
  }
  if (buffers.status) clear(buffers.status, sizeof(CallStatus), stream);
  if (call.problem.operation == Operation::backward)
    run_backward(call.problem, plan, buffers);
  else if (plan.decodes)
    run_decode(call.problem, plan, buffers);
  else
    run_forward(call.problem, plan, buffers);
  if (!check) return;
  CallStatus found;
  copy_to_host(&found, buffers.status, sizeof found, stream);
  synchronise(stream);
  if (found.code != 0) throw Error(ErrorCode::invalid_value, status_text(call.problem, found));
}

}  // namespace narrows::cuda
