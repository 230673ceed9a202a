// Included behind backward_scores.inl.hpp: P^T from scores and what is known of the rows, in fused and in natural units.

constexpr double kScaleOfTest = 0.7;

inline double exponent_of(float score, float lse, double scale) { return score * scale - lse; }

/// Rows as the kernel before leaves them; row 1 sees no key, row 2's LSE is NaN.
inline std::vector<float> put_lse(StepOfTest& step) {
  std::vector<float> lse(kBlockQueries);
  for (std::size_t row = 0; row < lse.size(); ++row) {
    lse[row] = row == 1 ? kNegInf : row == 2 ? kNan : step.normal(3);
    const float reference = kNatural ? lse[row] : lse[row] * static_cast<float>(kLog2e);
    step.facts[row] = {row == 1 ? kInfinity<float> : reference, kNan};
  }
  step.put_rows();
  return lse;
}

inline void expect_weights() {
  StepOfTest step(8);
  const std::vector<float> lse = put_lse(step);
  step.args.units = kNatural ? natural_units<float>() : fused_units<float>(kScaleOfTest);
  Pairs<float> from = step.draw(5);
  each_pair([&](i32 query, i32 key) {
    if (key % 5 == 2 && query != 2) from.at(query, key) = kHidden;
  });
  from.at(3, 3) = kNan;
  const Pairs<float> got = step.run(from, [&](Scores& s) { weigh(s, step.args, kFactsAt); });
  expect_pairs(got, [&](i32 query, i32 key) -> Near {
    const float x = from.at(query, key);
    if (query == 2 || (query == 3 && key == 3)) return {kNan, 0};
    if (query == 1 || x == kHidden) return {0, 0};
    const double exponent = exponent_of(x, lse[static_cast<std::size_t>(query)], kNatural ? 1 : kScaleOfTest);
    EXPECT_LE(got.at(query, key), 1.f);
    const double p = std::exp(std::min(exponent, 0.));
    return {p, 3e-6 * (1 + std::abs(exponent)) * p};
  });
}

/// Rows whose LSE is far out: it is read where it is, of rows that exist, and the others stay.
inline void expect_far_rows() {
  StepOfTest step(9);
  const i64 row_stride = 3, head_stride = 1, sequence_stride = 2;
  const i32 exist = step.block.queries - kFirstRow;
  const auto index = [&](i32 query) {
    return static_cast<std::size_t>(kSequence * sequence_stride + kHead * head_stride +
                                    (step.block.first_query + kFirstRow + query) * row_stride);
  };
  std::vector<float> lse(index(exist - 1) + 1);
  step.args.lse.data = reinterpret_cast<char*>(lse.data());
  step.args.lse.strides[0] = 4 * sequence_stride, step.args.lse.strides[1] = 4 * head_stride;
  step.args.lse.strides[2] = 4 * row_stride;
  step.args.units = fused_units<float>(kScaleOfTest);
  Pairs<float> from = step.draw(5);
  for (i32 query = 0; query < exist; ++query) {
    const float far = query % 4 == 1 ? 3e7f : query % 4 == 2 ? -1e9f : query % 4 == 3 ? 0 : kFarLse;
    lse[index(query)] = query == 7 ? kNegInf : far;
    step.facts[static_cast<std::size_t>(query)] = {is_far(far) ? 0 : far * static_cast<float>(kLog2e), 0};
    for (i32 key = 0; key < kBlockKeys; ++key) from.at(query, key) += far / step.args.units.scale;
    from.at(query, 4) = kHidden;
  }
  step.put_rows();
  const Pairs<float> near = step.run(from, [&](Scores& s) { bring_near(s, step.args, step.block, kHead, kFirstRow); });
  const Pairs<float> got = step.run(near, [&](Scores& s) { weigh(s, step.args, kFactsAt); });
  const auto row_of = [&](i32 query) { return query < exist ? lse[index(query)] : 0.f; };
  expect_pairs(near, [&](i32 query, i32 key) -> Near {
    return {is_far(row_of(query)) ? near.at(query, key) : from.at(query, key), 0};
  });
  expect_pairs(got, [&](i32 query, i32 key) -> Near {
    const float x = from.at(query, key), row = row_of(query);
    if (!is_far(row)) return {got.at(query, key), 0};
    if (x == kHidden) return {0, 0};
    // The product is rounded as the forward pass rounded it into the LSE.
    const double exponent = static_cast<double>(x * step.args.units.scale) - static_cast<double>(row);
    const double expected = exponent < -80 ? 0 : std::exp(std::min(exponent, 0.));
    return {expected, 1e-5 * expected + 1e-30};
  });
}
