// On what a table was measured.
#pragma once

#include <string>

#include "tools/bench_peers.hpp"

namespace narrows::cli {

/// Lines: this library and the date; the CPU, its cores and caches; what runs on it; the peers.
std::string machine_text(const Peers& peers);

}  // namespace narrows::cli
