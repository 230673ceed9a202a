#include "tools/bench_measure.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cpu/machine.hpp"
#include "cpu/peak.hpp"
#include "tools/bench_call.hpp"

namespace narrows::cli {
namespace {

constexpr double kOwnWarmth = 0.02;            // s: a longer call is its own warming up
constexpr double kSlowPeer = 5;                // s of a round, after which a peer has no other
constexpr std::chrono::milliseconds kRest{5};  // after which threads that wait a little for more work sleep

double once(const BenchCall& call) {
  const auto begin = std::chrono::steady_clock::now();
  call.run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// A round of ours.
void run(const BenchCall& call, double budget, std::vector<double>& seconds) {
  if (seconds.empty() || seconds.back() < kOwnWarmth) once(call);
  double spent = 0;
  while (spent == 0 || spent < budget) {
    seconds.push_back(once(call));
    spent += seconds.back();
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 != 0 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// Calls so long that more would tell little.
bool enough(const std::vector<double>& seconds) {
  constexpr std::size_t kLeastCalls = 3;
  constexpr double kLong = 1;
  return seconds.size() >= kLeastCalls && std::accumulate(seconds.begin(), seconds.end(), 0.0) > kLong;
}

struct Contender {
  std::string name;
  std::vector<double> milliseconds;
  bool going = true;
};

void run(Contender& contender, Peers& peers, double budget) {
  const std::vector<double> round = peers.time(contender.name, budget);
  contender.milliseconds.insert(contender.milliseconds.end(), round.begin(), round.end());
  if (round.empty()) contender.milliseconds.clear();  // it broke: what it gave before is not to be relied on
  contender.going = !round.empty() && std::accumulate(round.begin(), round.end(), 0.0) < kSlowPeer * 1e3;
}

}  // namespace

double Peaks::measure(const Row& row, std::int64_t bytes) {
  const bool reads = row.op == Op::decode;
  double& best = best_[{reads ? DType::uint8 : row.dtype, row.threads, reads ? bytes : 0}];
  best =
      std::max(best, reads ? cpu::read_rate(row.threads, static_cast<std::size_t>(bytes)) * 1e-9
                           : cpu::peak_rate(cpu::machine().instruction_sets.front(), row.dtype, row.threads) * 1e-12);
  return best;
}

void measure(Row& row, Peaks& peaks, Peers& peers, const Effort& effort) {
  constexpr int kMeasuredAgain = 5;
  const BenchCall call(row);
  row.extra_bytes = call.extra_bytes();
  std::vector<Contender> contenders;
  for (std::string& name : peers.prepare(row)) contenders.push_back({std::move(name), {}});
  std::vector<double> seconds;
  for (int round = 0; round < effort.rounds && !enough(seconds); ++round) {
    run(call, effort.seconds, seconds);
    if (!contenders.empty()) std::this_thread::sleep_for(kRest);
    for (Contender& contender : contenders)
      if (contender.going) run(contender, peers, effort.seconds);
  }
  for (const Contender& contender : contenders)
    if (!contender.milliseconds.empty()) row.peers[contender.name] = median(contender.milliseconds);
  const double best = *std::min_element(seconds.begin(), seconds.end());
  row.milliseconds = median(seconds) * 1e3;
  row.best_milliseconds = best * 1e3;
  row.rate = row.op == Op::decode ? static_cast<double>(call.bytes()) / best * 1e-9 : call.flops() / best * 1e-12;
  row.peak = peaks.measure(row, call.bytes());
  // The loop may have met other processes that the row did not.
  for (int again = 0; row.impossible() && again < kMeasuredAgain; ++again) row.peak = peaks.measure(row, call.bytes());
}

}  // namespace narrows::cli
