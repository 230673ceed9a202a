// A program outside the tree that knows the installed header and library only.
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <narrows/narrows.hpp>
#include <string>

namespace {

// One query and two keys in one head: the logits are 0 and ln 3, so the weights are 1/4 and 3/4.
double weighted_value() {
  std::array<float, 1> q{1.0F};
  std::array<float, 2> k{0.0F, std::log(3.0F)};
  std::array<float, 2> v{8.0F, 16.0F};
  std::array<float, 1> o{std::numeric_limits<float>::quiet_NaN()};
  narrows::forward({.q = narrows::view(q.data(), {1, 1, 1, 1}),
                    .k = narrows::view(k.data(), {1, 2, 1, 1}),
                    .v = narrows::view(v.data(), {1, 2, 1, 1})},
                   {.o = narrows::view(o.data(), {1, 1, 1, 1})});
  return o[0];
}

// The library's exception must be catchable across its boundary.
std::string refusal() {
  try {
    narrows::forward({}, {});
  } catch (const narrows::Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

int main() {
  const double o = weighted_value();
  const std::string text = refusal();
  std::printf("o = %.6f, version %s, refusal: %s\n", o, std::string(narrows::version()).c_str(), text.c_str());
  return std::abs(o - 14.0) < 1e-5 && narrows::version() == EXPECTED_VERSION && !text.empty() ? 0 : 1;
}
