// Included in the namespace of device text with its constants: whole thread blocks of the kernel of dK, dV and the sums of dQ of
// family sm90 on the host, roles, barriers and all, against the definition. What is asynchronous on the GPU is done at once
// here, so that a missing wait is not found; a wrong place, count or mask is.

/// Two sequences of a dense call, the second with fewer rows and keys; what is behind them holds NaN.
struct BackwardCall {
  static constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  static constexpr i32 d = kHeadDim - 8, dv = kValueDim - 8, batch = 2, heads = 2, group = 2, kv_heads = 1;

  i32 query_rows, key_rows;
  std::vector<i32> used_queries, used_keys;
  std::vector<unsigned short> q, k, v, dout, dk, dv_;
  std::vector<double> lse, delta;
  std::vector<float> lse_of_rows, facts, sums;
  std::vector<u32> turns;
  u32 far = 0, begun = 0;
  BackwardSm90Args args;
  std::vector<float> slopes{0.03f, 0.11f}, slope_sums;
  double scale = 0.1, cap = 0.9;

  static unsigned short bits(float x) { return static_cast<unsigned short>(pack(x, 0.f)); }
  static double value(unsigned short x) { return static_cast<double>(element_of(x, kElement == Element::fp16)); }

  BackwardCall(std::vector<i32> queries, std::vector<i32> keys, const Mask& mask, bool top_left = false)
      : query_rows(queries[0]), key_rows(keys[0]), used_queries(std::move(queries)), used_keys(std::move(keys)) {
    args.visibility = mask;
    args.top_left = top_left;
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto make = [&](i32 rows, const std::vector<i32>& used, i32 count, i32 columns) {
      std::vector<unsigned short> all;
      for (i32 s = 0; s < batch; ++s)
        for (i32 row = 0; row < rows; ++row)
          for (i32 x = 0; x < count * columns; ++x)
            all.push_back(bits(row < used[static_cast<std::size_t>(s)] ? normal(random) : kPoison));
      return all;
    };
    q = make(query_rows, used_queries, heads, d);
    dout = make(query_rows, used_queries, heads, dv);
    k = make(key_rows, used_keys, kv_heads, d);
    v = make(key_rows, used_keys, kv_heads, dv);
    dk.assign(k.size(), bits(kPoison));
    dv_.assign(v.size(), bits(kPoison));
    find_rows();
    describe_all();
  }

  std::size_t row_of(i32 s, i32 h, i32 i) const {
    return (static_cast<std::size_t>(s) * heads + static_cast<std::size_t>(h)) * static_cast<std::size_t>(query_rows) +
           static_cast<std::size_t>(i);
  }
  i32 shift(i32 s) const {
    return args.top_left ? 0 : used_keys[static_cast<std::size_t>(s)] - used_queries[static_cast<std::size_t>(s)];
  }
  bool seen(i32 s, i32 i, i32 j) const {
    const i32 keys = used_keys[static_cast<std::size_t>(s)], queries = used_queries[static_cast<std::size_t>(s)];
    return i < queries && j < keys && visible(args.visibility, i64{i} + shift(s), j, keys);
  }
  static double dot(const std::vector<unsigned short>& a, std::size_t first, const std::vector<unsigned short>& b,
                    std::size_t second, i32 columns) {
    double sum = 0;
    for (std::size_t x = 0; x < static_cast<std::size_t>(columns); ++x)
      sum += value(a[first + x]) * value(b[second + x]);
    return sum;
  }
  std::size_t query_at(i32 s, i32 i, i32 h, i32 columns) const {
    return static_cast<std::size_t>(((s * query_rows + i) * heads + h) * columns);
  }
  std::size_t key_at(i32 s, i32 j, i32 columns) const { return static_cast<std::size_t>((s * key_rows + j) * columns); }

  double distance(i32 s, i32 i, i32 j) const { return std::abs(i + shift(s) - j); }
  double tangent(i32 s, i32 h, i32 i, i32 j) const {
    return std::tanh(scale * dot(q, query_at(s, i, h, d), k, key_at(s, j, d), d) / cap);
  }
  double logit(i32 s, i32 h, i32 i, i32 j) const {
    double x = scale * dot(q, query_at(s, i, h, d), k, key_at(s, j, d), d);
    if (kSoftcap) x = cap * tangent(s, h, i, j);
    if (kAlibi) x -= static_cast<double>(slopes[static_cast<std::size_t>(h)]) * distance(s, i, j);
    return x;
  }

  /// LSE, delta of any size, and the facts as the kernel before leaves them.
  void find_rows() {
    const i32 blocks = ceil_div(query_rows, kBlockQueries);
    lse.assign(row_of(batch, 0, 0), -kInfinity<double>);
    delta.assign(lse.size(), 0);
    lse_of_rows.assign(lse.size(), kPoison);
    facts.assign(static_cast<std::size_t>(2 * batch * heads * blocks * kBlockQueries), 0.f);
    for (i32 s = 0; s < batch; ++s)
      for (i32 h = 0; h < heads; ++h)
        for (i32 i = 0; i < blocks * kBlockQueries; ++i) {
          double sum = 0;
          for (i32 j = 0; j < key_rows && i < query_rows; ++j)
            if (seen(s, i, j)) sum += std::exp(logit(s, h, i, j));
          const std::size_t block = static_cast<std::size_t>((s * heads + h) * blocks + i / kBlockQueries);
          float* const own = &facts[block * 2 * kBlockQueries];
          own[fact_place(i % kBlockQueries)] = kInfinity<float>;
          if (sum == 0) continue;
          lse[row_of(s, h, i)] = std::log(sum);
          lse_of_rows[row_of(s, h, i)] = static_cast<float>(std::log(sum));
          delta[row_of(s, h, i)] = 0.5 - 0.125 * (i % 7);
          own[fact_place(i % kBlockQueries)] = static_cast<float>(kNatural ? std::log(sum) : std::log2(sum));
          own[kBlockQueries + fact_place(i % kBlockQueries)] = static_cast<float>(delta[row_of(s, h, i)]);
        }
  }

  void describe_all() {
    const auto set = [&](TensorArg& arg, TensorMap* map, std::vector<unsigned short>& data, i32 rows, i32 count,
                         i32 columns, i64 box) {
      const i64 row = 2 * i64{count} * columns, sequence = rows * row;
      arg.data = reinterpret_cast<char*>(data.data());
      for (const auto& [axis, stride] : {std::pair{0, sequence}, {1, row}, {2, 2 * i64{columns}}, {3, i64{2}}})
        arg.strides[axis] = stride;
      if (map) *map = describe({arg.data, {columns, rows, count, batch}, {2, row, 2 * i64{columns}, sequence}, box});
    };
    constexpr i32 query_box = kBlockQueries / kCluster, key_box = kBlockKeys / kCluster;
    set(args.q, &args.q_map, q, query_rows, heads, d, query_box);
    set(args.dout, &args.dout_map, dout, query_rows, heads, dv, query_box);
    set(args.k, &args.k_map, k, key_rows, kv_heads, d, key_box);
    set(args.v, &args.v_map, v, key_rows, kv_heads, dv, key_box);
    set(args.dk, nullptr, dk, key_rows, kv_heads, d, 0);
    set(args.dv, nullptr, dv_, key_rows, kv_heads, dv, 0);
    args.lse = {reinterpret_cast<char*>(lse_of_rows.data()), {4 * heads * query_rows, 4 * query_rows, 4, 0}};
    args.batch = batch;
    args.heads = heads;
    args.group = group;
    args.kv_heads = kv_heads;
    args.query_rows = query_rows;
    args.key_rows = key_rows;
    args.head_dim = d;
    args.value_dim = dv;
    args.score_rows = args.score_keys = 0x7fffffff;
    args.seqused_q = {used_queries.data(), 1};
    args.seqused_k = {used_keys.data(), 1};
    args.units = kNatural ? natural_units<float>() : fused_units<float>(scale);
    args.rules = score_rules<float>(scale, kSoftcap ? cap : 0.0, 0.f);
    args.alibi_slopes = {reinterpret_cast<char*>(slopes.data()), {0, 4, 0, 0}, Element::fp32};
    args.query_blocks = ceil_div(query_rows, kBlockQueries);
    args.key_blocks = ceil_div(key_rows, kBlockKeys);
    args.section = 2;
    // Taking turns, who is the first to add to a row that sees a key stores instead.
    sums.assign(static_cast<std::size_t>(batch * heads * args.query_blocks * kSumsOfBlock),
                kDeterministic ? kPoison : 0.f);
    turns.assign(static_cast<std::size_t>(batch * heads * args.query_blocks * kWarps), 0);
    slope_sums.assign(static_cast<std::size_t>(heads * batch * args.key_blocks), 0.f);
    if (kAlibi) args.slope_sums = slope_sums.data();
    args.far_rows = &far;
    args.rows = reinterpret_cast<RowFacts*>(facts.data());
    args.query_sums = sums.data();
    args.turns = turns.data();
    args.begun = &begun;
  }

  void run() {
    const u32 blocks = static_cast<u32>(kCluster * args.key_blocks * batch * kv_heads);
    for (u32 first = 0; first < blocks; first += kCluster) {
      ::narrows::test::Cluster cluster(kCluster, kThreads / kWarp, kSharedBytes);
      cluster.run([&] { run_kernel(args); }, first, blocks, 0xff);  // NaN
    }
  }

  double weight(i32 s, i32 h, i32 i, i32 j) const {
    return seen(s, i, j) ? std::exp(logit(s, h, i, j) - lse[row_of(s, h, i)]) : 0;
  }
  double gradient_of_logit(i32 s, i32 h, i32 i, i32 j) const {
    if (!seen(s, i, j)) return 0;
    return weight(s, h, i, j) * (dot(dout, query_at(s, i, h, dv), v, key_at(s, j, dv), dv) - delta[row_of(s, h, i)]);
  }

  double gradient(i32 s, i32 h, i32 i, i32 j) const {
    const double own = gradient_of_logit(s, h, i, j), t = kSoftcap && seen(s, i, j) ? tangent(s, h, i, j) : 0;
    return own * (1 - t * t);
  }

  void expect_slopes() const {
    for (i32 h = 0; h < heads; ++h) {
      double expected = 0, found = 0, size = 0;
      for (i32 s = 0; s < batch; ++s)
        for (i32 i = 0; i < query_rows; ++i)
          for (i32 j = 0; j < key_rows; ++j) {
            const double part = seen(s, i, j) ? distance(s, i, j) * gradient_of_logit(s, h, i, j) : 0;
            expected -= part;
            size += std::abs(part);
          }
      const std::size_t blocks = slope_sums.size() / heads;
      for (std::size_t block = 0; block < blocks; ++block)
        found += static_cast<double>(slope_sums[static_cast<std::size_t>(h) * blocks + block]);
      ASSERT_NEAR(found, expected, 1e-3 * size) << "head " << h;
    }
  }
  void expect_keys(i32 s, i32 j) const {
    std::vector<double> of_k(static_cast<std::size_t>(d)), of_v(static_cast<std::size_t>(dv));
    for (i32 h = 0; h < heads; ++h)
      for (i32 i = 0; i < query_rows; ++i) {
        if (!seen(s, i, j)) continue;
        const double p = weight(s, h, i, j), g = gradient(s, h, i, j);
        for (std::size_t x = 0; x < of_v.size(); ++x) of_v[x] += p * value(dout[query_at(s, i, h, dv) + x]);
        for (std::size_t x = 0; x < of_k.size(); ++x) of_k[x] += scale * g * value(q[query_at(s, i, h, d) + x]);
      }
    for (std::size_t x = 0; x < of_v.size(); ++x)
      ASSERT_NEAR(value(dv_[key_at(s, j, dv) + x]), of_v[x], 0.02 + 0.01 * std::abs(of_v[x])) << s << " key " << j;
    for (std::size_t x = 0; x < of_k.size(); ++x)
      ASSERT_NEAR(value(dk[key_at(s, j, d) + x]), of_k[x], 0.04 + 0.01 * std::abs(of_k[x])) << s << " key " << j;
  }
  /// By a row of the block that row i is of.
  bool any_seen(i32 s, i32 i) const {
    const i32 first = i / kBlockQueries * kBlockQueries;
    for (i32 row = first; row < first + kBlockQueries; ++row)
      for (i32 j = 0; j < key_rows; ++j)
        if (seen(s, row, j)) return true;
    return false;
  }
  void expect_query(i32 s, i32 h, i32 i) const {
    std::vector<double> of_q(static_cast<std::size_t>(d));
    for (i32 j = 0; j < key_rows; ++j) {
      if (!seen(s, i, j)) continue;
      const double g = gradient(s, h, i, j);
      for (std::size_t x = 0; x < of_q.size(); ++x) of_q[x] += g * value(k[key_at(s, j, d) + x]);
    }
    const i32 block = (s * heads + h) * args.query_blocks + i / kBlockQueries, row = i % kBlockQueries;
    for (i32 x = 0; x < d; ++x) {
      const i32 at =
          block * kSumsOfBlock + sum_place(row / 16, x / 8, row % 8 * 4 + x % 8 / 2, row / 8 % 2 * 2 + x % 2);
      const double expected = of_q[static_cast<std::size_t>(x)];
      if (kDeterministic && !any_seen(s, i)) continue;
      ASSERT_NEAR(static_cast<double>(sums[static_cast<std::size_t>(at)]), expected, 0.06 + 0.01 * std::abs(expected))
          << s << " row " << i << " head " << h << " column " << x;
    }
  }
  void expect_all() const {
    if (kAlibi) {
      ASSERT_NO_FATAL_FAILURE(expect_slopes());
    }
    for (i32 s = 0; s < batch; ++s) {
      for (i32 j = 0; j < key_rows; ++j) ASSERT_NO_FATAL_FAILURE(expect_keys(s, j));
      for (i32 h = 0; h < heads; ++h)
        for (i32 i = 0; i < query_rows; ++i) ASSERT_NO_FATAL_FAILURE(expect_query(s, h, i));
    }
  }
};

inline void expect_backward(std::vector<i32> queries, std::vector<i32> keys, const Mask& mask) {
  BackwardCall call(std::move(queries), std::move(keys), mask);
  call.run();
  call.expect_all();
}

/// Rows end within a block, and behind the first block of keys there are others that no row sees: they take no turn, as one for
/// which there is none would be waited for without end.
inline void expect_turns_of_seen_keys_alone() {
  BackwardCall call({100, 70}, {300, 150}, {kUnlimited, 0, 0}, true);
  i32 with_steps = 0;
  const u32 blocks = static_cast<u32>(call.args.key_blocks * BackwardCall::batch * BackwardCall::kv_heads);
  for (u32 index = 0; index < blocks; ++index) {
    ::narrows::test::Block block(kThreads / kWarp, 0);
    block.run(
        [&] {
          const KeyBlock keys = find_key_block(call.args, index, kLastKeysFirst);
          if (threadIdx.x == 0) with_steps += step_count(call.args, keys) > 0;
        },
        index, blocks);
  }
  ASSERT_EQ(with_steps, 2) << "the first block of each sequence";
  call.run();
  call.expect_all();
}
