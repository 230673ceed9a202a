// A call on a GPU of few query rows against many keys: in a cache, to which it may append, or in tensors.
#pragma once

#include "cuda/kernel.hpp"
#include "plan/plan.hpp"
#include "shared/decode_args.h"

namespace narrows::cuda {

/// Enqueues the call on its stream. Its device is current. Throws Error before anything is written.
void run_decode(const Problem& problem, const Plan& plan, const Buffers& buffers);

/// Compiles and loads what run_decode will launch.
void prepare_decode(const Problem& problem, const Plan& plan);

/// Whether a call has rows for its cache, which kernel writes them there, and its launch before those that read: blocks, of all that
/// write; args: of the call.
bool appends_rows(const Problem& problem);
ProgramKey append_key(Element element);
void launch_append(const Kernel& append, const Problem& problem, const DecodeArgs& args, i64 blocks, Stream stream);

/// What is said of a call's tensors and of the cache that its keys lie in. natural: scores are logits.
DecodeArgs cache_args(const Problem& problem, const Buffers& buffers, bool natural);
/// What the kernels are given. scratch: the plan's regions, one behind the other. Reads no device memory.
DecodeArgs decode_args(const Problem& problem, const Plan& plan, const Buffers& buffers, std::byte* scratch);

}  // namespace narrows::cuda
