// What `narrows info` says of CUDA: driver, devices, compiler, compiled kernels, or why one of them is not there.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace narrows::cli {

nlohmann::ordered_json cuda_json();
std::string cuda_text();

}  // namespace narrows::cli
