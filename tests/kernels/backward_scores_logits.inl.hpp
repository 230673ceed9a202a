// Included behind backward_scores.inl.hpp, in natural units: logits by all score rules, and their softcap on the way back.
#include <type_traits>

using BiasOfTest = std::conditional_t<kBiasElement == Element::fp32, float, unsigned short>;

inline float number(const BiasOfTest& x) { return load_element(reinterpret_cast<const char*>(&x), kBiasElement); }

inline void expect_logits() {
  StepOfTest step(10);
  const ScoreRules<float> rules = score_rules<float>(0.3, 1.7, 0.013f);
  Elements<BiasOfTest> bias(step.block, step.block.keys * 2 + 1, 2);
  for (BiasOfTest& x : bias.x) store_number(reinterpret_cast<char*>(&x), kBiasElement, step.normal());
  step.args.bias = bias.arg;
  const Pairs<float> from = step.draw(6), gradients = step.draw();
  Pairs<float> through;
  const Pairs<float> got = step.run(from, [&](Scores& s) {
    Tangents tangents;
    make_logits(s, tangents, step.args, step.block, rules, kHead, kFirstRow);
    const LanePlace place;
    Scores g;
    each_score(g, [&](int r, int j, int e, float& x) { x = gradients.at(place.query(j, e), place.key(r)); });
    pass_softcap(g, tangents);
    each_score(g, [&](int r, int j, int e, float& x) { through.at(place.query(j, e), place.key(r)) = x; });
  });
  const auto tangent = [&](i32 query, i32 key) { return std::tanh(from.at(query, key) * 0.3 / 1.7); };
  expect_pairs(got, [&](i32 query, i32 key) -> Near {
    const i64 row = kFirstRow + query, j = step.block.first + key, away = row + step.block.shift - j;
    const bool exists = row < step.block.queries && j < step.block.keys;
    const double added = exists ? number(bias.x[static_cast<std::size_t>(bias.index(row, j))]) : 0;
    const double linear = static_cast<double>(away < 0 ? -away : away) * static_cast<double>(0.013f);
    return {tangent(query, key) * 1.7 - linear + added, 3e-6 * (2 + linear + std::abs(added))};
  });
  expect_pairs(through, [&](i32 query, i32 key) -> Near {
    const double t = tangent(query, key), g = gradients.at(query, key);
    return {g * (1 - t * t), 5e-6 * std::abs(g)};
  });
}
