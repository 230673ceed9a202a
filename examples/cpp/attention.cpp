// Causal attention of 8 query heads over 2 kv heads, and what the call costs.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <narrows/narrows.hpp>
#include <vector>

int main() {
  constexpr std::int64_t b = 1, s = 1024, h = 8, hk = 2, d = 64;
  std::vector<float> q(b * s * h * d), k(b * s * hk * d), v(b * s * hk * d), o(q.size()), lse(b * h * s);
  for (std::size_t n = 0; n < q.size(); ++n) q[n] = std::sin(0.37F * static_cast<float>(n));
  for (std::size_t n = 0; n < k.size(); ++n) k[n] = std::sin(0.11F * static_cast<float>(n));
  for (std::size_t n = 0; n < v.size(); ++n) v[n] = std::cos(0.23F * static_cast<float>(n));

  try {
    const narrows::Inputs in{.q = narrows::view(q.data(), {b, s, h, d}),
                             .k = narrows::view(k.data(), {b, s, hk, d}),
                             .v = narrows::view(v.data(), {b, s, hk, d})};
    const narrows::Outputs out{.o = narrows::view(o.data(), {b, s, h, d}), .lse = narrows::view(lse.data(), {b, h, s})};
    narrows::Options options;
    options.causal = narrows::Causal::bottom_right;

    narrows::forward(in, out, options);
    std::printf("row 0 sees key 0 alone: o %g, v %g\n", o[1], v[1]);
    std::printf("row %d, head 0: o %g, lse %g\n\n", static_cast<int>(s - 1), o[(s - 1) * h * d], lse[s - 1]);
    std::puts(narrows::explain(in, options).text().c_str());
  } catch (const narrows::Error& error) {
    std::fprintf(stderr, "attention: %s\n", error.what());
    return 1;
  }
}
