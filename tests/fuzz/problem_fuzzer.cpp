// Calls made of bytes through explain and forward. Nothing may crash or throw anything but Error, a refused call writes
// nothing, an accepted one writes o and lse wholly and nothing else but appended keys, and explain accepts what forward
// accepts.
#include "tests/fuzz/caller.hpp"

namespace {

using namespace narrows;

class ForwardCaller : fuzz::Caller {
 public:
  using Caller::Caller;

  void call() {
    make(false);
    const bool explained = fuzz::accepts([&] {
      const Explanation explanation = explain(in_, options_);
      fuzz::require(explanation.visible_pairs >= 0 && explanation.flops >= 0 && explanation.fused_bytes >= 0);
      fuzz::require(!explanation.text().empty());
    });
    const bool accepted = fuzz::accepts([&] { forward(in_, out_, options_); });
    fuzz::require(explained || !accepted);
    check_results(accepted);
    // Again with other threads and no scratch of the caller's: the same bits. Sequences that append to one slot are the caller's error.
    if (!accepted || options_.k_new.given()) return;
    const auto first = take_results();
    fuzz::require(first.size() == (out_.lse.given() ? 2 : 1));
    options_.threads = options_.threads == 1 ? 3 : 1;
    options_.workspace = {};
    forward(in_, out_, options_);
    fuzz::require(take_results() == first);
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ForwardCaller(data, size).call();
  return 0;
}
