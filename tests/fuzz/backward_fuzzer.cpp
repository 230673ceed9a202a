// Calls made of bytes through backward: o and lse are any numbers. Nothing may crash or throw anything but Error, a refused
// call writes nothing, an accepted one writes every gradient that it was asked for wholly and nothing else, in the same bits
// on other threads; and a call whose scratch has a size accepts scratch of that size.
#include "tests/fuzz/caller.hpp"

namespace {

using namespace narrows;

class BackwardCaller : fuzz::Caller {
 public:
  using Caller::Caller;

  void call() {
    make(true);
    std::int64_t scratch = -1;
    const bool sized = fuzz::accepts([&] { scratch = backward_workspace_size(in_, options_); });
    fuzz::require(!sized || scratch >= 0);
    const auto run = [&] { backward({in_.q, in_.k, in_.v, out_.o, out_.lse, dout_, dlse_}, gradients_, options_); };
    const bool accepted = fuzz::accepts(run);
    fuzz::require(sized || !accepted);
    check_results(accepted);
    if (!accepted) return;
    const auto first = take_results();
    std::vector<std::uint8_t> own;
    if (scratch < kMostScratch) {
      own.assign(static_cast<std::size_t>(scratch), fuzz::kPoison);
      options_.workspace = view(own.data(), {scratch});
    } else {
      options_.threads = options_.threads == 1 ? 3 : 1;
      options_.workspace = {};
    }
    run();
    fuzz::require(take_results() == first);
  }

 private:
  static constexpr std::int64_t kMostScratch = 1 << 26;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  BackwardCaller(data, size).call();
  return 0;
}
