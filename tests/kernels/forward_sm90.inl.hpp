// Included in the namespace of device text with its constants: whole thread blocks of the sm90 kernel on the host,
// roles, barriers and all, against the definition. What is asynchronous on the GPU is done at once here, so that a
// missing wait is not found; a wrong place, count or mask is, and a barrier that nobody completes is waited for until
// the test's time is over.

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

/// Dense or packed sequences with lengths of their own; what no row may see holds NaN.
struct WholeCall {
  struct Lengths {
    i32 first_query, queries, rows, first_key, keys;  // rows: that the tensor has
  };

  /// Of each sequence's keys, the rows of k and v.
  using Places = std::vector<std::vector<i32>>;

  bool varlen;
  i32 heads = 2, group = 2, d = kHeadDim - 8, dv = kValueDim - 8;
  std::vector<Lengths> sequences;
  i32 query_rows = 0, key_rows = 0;  // of all sequences, one after the other in memory
  std::vector<unsigned short> q, k, v, o;
  std::vector<float> lse, slopes{0.5f, 0.0625f}, sinks{0.25f, -1.5f};
  std::vector<i32> query_starts{0}, key_starts{0}, used_queries, used_keys;
  Places places;
  KernelArgs args;
  double scale = 0.3;

  /// rows: of k and v; without places keys lie where the lengths say.
  WholeCall(bool varlen_, std::vector<Lengths> lengths, Places places_ = {}, i32 rows = 0)
      : varlen(varlen_), sequences(std::move(lengths)), places(std::move(places_)) {
    for (const Lengths& s : sequences) {
      query_rows = max_of(query_rows, s.first_query + s.rows);
      query_starts.push_back(s.first_query + s.rows);
      used_queries.push_back(s.queries);
      used_keys.push_back(s.keys);
    }
    for (std::size_t s = 1; s < sequences.size(); ++s) key_starts.push_back(sequences[s].first_key);
    key_starts.push_back(sequences.back().first_key + sequences.back().keys + 3);
    key_rows = places.empty() ? key_starts.back() + 5 : rows;
    if (places.empty())
      for (const Lengths& s : sequences) {
        places.emplace_back(static_cast<std::size_t>(s.keys));
        std::iota(places.back().begin(), places.back().end(), s.first_key);
      }
    query_rows += varlen ? 9 : 0;  // rows behind the last sequence
    fill();
  }
  virtual ~WholeCall() = default;

  static unsigned short bits(float x) {
    return static_cast<unsigned short>(kElement == Element::fp16 ? fp16_bits(x) : bf16_bits(x));
  }
  static float value(unsigned short x) { return element_of(x, kElement == Element::fp16); }

  void fill() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto make = [&](i32 rows, i32 count, i32 columns) {
      std::vector<unsigned short> all(static_cast<std::size_t>(rows * count * columns));
      for (unsigned short& x : all) x = bits(normal(random));
      return all;
    };
    const i32 kv_heads = heads / group;
    q = make(query_rows, heads, d);
    k = make(key_rows, kv_heads, d);
    v = make(key_rows, kv_heads, dv);
    for (i32 row = 0; row < key_rows; ++row) {
      bool used = false;
      for (const std::vector<i32>& rows : places) used = used || std::count(rows.begin(), rows.end(), row) != 0;
      if (!used) poison_row(row);
    }
    o.assign(static_cast<std::size_t>(query_rows * heads * dv), bits(kPoison));
    lse.assign(static_cast<std::size_t>(query_rows * heads), kPoison);
  }

  void poison_row(i32 row) {
    const i32 kv_heads = heads / group;
    std::fill_n(&k[static_cast<std::size_t>(row * kv_heads * d)], kv_heads * d, bits(kPoison));
    std::fill_n(&v[static_cast<std::size_t>(row * kv_heads * dv)], kv_heads * dv, bits(kPoison));
  }

  /// By a row of the sequence.
  bool is_seen(std::size_t s, i32 j) const {
    const Lengths& at = sequences[s];
    for (i32 i = 0; i < at.queries; ++i)
      if (visible(args.visibility, i + i64{at.keys} - at.queries, j, at.keys)) return true;
    return false;
  }

  /// Keys that a sequence has and none of its rows sees.
  void poison_unseen() {
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (i32 j = 0; j < sequences[s].keys; ++j)
        if (!is_seen(s, j)) poison_row(places[s][static_cast<std::size_t>(j)]);
  }

  /// Rows of a dense call's sequences lie `first_query` and `first_key` of the second apart.
  virtual void describe_all() {
    const i32 batch = static_cast<i32>(sequences.size()), kv_heads = heads / group;
    const i32 queries = varlen ? query_rows : sequences[0].rows, keys = varlen ? key_rows : sequences[1].first_key;
    const auto set = [&](TensorArg& arg, TensorMap& map, std::vector<unsigned short>& data, i32 rows, i32 count,
                         i32 columns, i64 box) {
      const i64 row = 2 * i64{count} * columns, sequence = varlen ? 0 : rows * row;
      arg.data = reinterpret_cast<char*>(data.data());
      for (const auto& [axis, stride] : {std::pair{0, sequence}, {1, row}, {2, 2 * i64{columns}}, {3, i64{2}}})
        arg.strides[axis] = stride;
      map = describe({arg.data, {columns, rows, count, varlen ? 1 : batch}, {2, row, 2 * i64{columns}, sequence}, box});
    };
    set(args.q, args.q_map, q, queries, heads, d, kPartRows);
    set(args.k, args.k_map, k, keys, kv_heads, d, kBlockKeys);
    set(args.v, args.v_map, v, keys, kv_heads, dv, kBlockKeys);
    set(args.o, args.o_map, o, queries, heads, dv, kPartRows);
    args.lse.data = reinterpret_cast<char*>(lse.data());
    args.lse.strides[0] = varlen ? 0 : 4 * i64{heads} * queries;
    args.lse.strides[1] = 4 * i64{queries};
    args.lse.strides[2] = 4;
    args.batch = batch;
    args.heads = heads;
    args.group = group;
    args.query_rows = queries;
    args.key_rows = keys;
    args.head_dim = d;
    args.value_dim = dv;
    args.score_rows = args.score_keys = 0x7fffffff;
    args.seqused_q = {used_queries.data(), 1};
    args.seqused_k = {used_keys.data(), 1};
    if (varlen) args.cu_seqlens_q = {query_starts.data(), 1};
    if (varlen) args.cu_seqlens_k = {key_starts.data(), 1};
    args.units = kNatural ? natural_units<float>() : fused_units<float>(scale);
    args.rules = score_rules<float>(scale, kSoftcap ? 4.0 : 0.0, 0.f);
    if (kAlibi) args.alibi_slopes = {reinterpret_cast<char*>(slopes.data()), {0, 4, 0, 0}, Element::fp32};
    if (kAlibi) args.sinks = {reinterpret_cast<char*>(sinks.data()), {4, 0, 0, 0}, Element::fp32};
    args.blocks =
        varlen ? static_cast<i32>(block_count(queries, batch, kBlockQueries)) : ceil_div(queries, kBlockQueries);
    args.section = 3;
    args.set_tiles(query_pairs(args));
  }

  void run(u32 blocks, bool counted) {
    poison_unseen();
    describe_all();
    u32 taken = 0;
    args.tiles_taken = counted ? &taken : nullptr;
    for (u32 index = 0; index < blocks; ++index) {
      ::narrows::test::Block block(kThreads / kWarp, kSharedBytes);
      std::fill(block.memory.begin(), block.memory.end(), static_cast<unsigned char>(0xff));  // NaN
      block.run([&] { forward_sm90(args); }, index, blocks);
    }
  }

  void expect_row(std::size_t s, i32 i, i32 h) const {
    const Lengths& at = sequences[s];
    const i32 kv_heads = heads / group, row = at.first_query + i;
    std::vector<double> logits, sums(static_cast<std::size_t>(dv));
    const bool exists = i < at.queries;
    const i64 p = i + i64{at.keys} - at.queries;
    double most = -std::numeric_limits<double>::infinity();
    for (i32 j = 0; j < at.keys; ++j) {
      double dot = 0;
      for (i32 x = 0; x < d; ++x)
        dot +=
            static_cast<double>(value(q[static_cast<std::size_t>((row * heads + h) * d + x)])) *
            value(k[static_cast<std::size_t>((places[s][static_cast<std::size_t>(j)] * kv_heads + h / group) * d + x)]);
      double logit = dot * scale;
      if (kSoftcap) logit = 4 * std::tanh(logit / 4);
      if (kAlibi)
        logit -= static_cast<double>(slopes[static_cast<std::size_t>(h)]) * static_cast<double>(std::abs(p - j));
      const bool seen = exists && visible(args.visibility, p, j, at.keys);
      logits.push_back(seen ? logit : -std::numeric_limits<double>::infinity());
      most = std::max(most, logits.back());
    }
    double sum = 0;
    if (kAlibi && exists) most = std::max(most, static_cast<double>(sinks[static_cast<std::size_t>(h)]));
    if (kAlibi && exists) sum = std::exp(static_cast<double>(sinks[static_cast<std::size_t>(h)]) - most);
    for (i32 j = 0; j < at.keys; ++j) {
      if (std::isinf(logits[static_cast<std::size_t>(j)])) continue;
      const double weight = std::exp(logits[static_cast<std::size_t>(j)] - most);
      sum += weight;
      for (i32 x = 0; x < dv; ++x)
        sums[static_cast<std::size_t>(x)] +=
            weight *
            value(
                v[static_cast<std::size_t>((places[s][static_cast<std::size_t>(j)] * kv_heads + h / group) * dv + x)]);
    }
    const i32 queries = varlen ? query_rows : sequences[0].rows;
    const std::size_t place = varlen ? static_cast<std::size_t>(h * queries + row)
                                     : (s * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)) *
                                               static_cast<std::size_t>(queries) +
                                           static_cast<std::size_t>(i);
    if (sum == 0)
      ASSERT_EQ(lse[place], -std::numeric_limits<float>::infinity()) << s << " " << i << " " << h;
    else
      ASSERT_NEAR(lse[place], most + std::log(sum), kSoftcap ? 5e-3 : 1e-5 * std::max(1.0, std::abs(most)))
          << s << " " << i << " " << h;
    for (i32 x = 0; x < dv; ++x)
      ASSERT_NEAR(value(o[static_cast<std::size_t>((row * heads + h) * dv + x)]),
                  sum == 0 ? 0 : sums[static_cast<std::size_t>(x)] / sum, kElement == Element::fp16 ? 4e-3 : 2e-2)
          << s << " row " << i << " head " << h << " column " << x;
  }
  void expect_all() const {
    for (i32 h = 0; h < heads; ++h) {
      for (std::size_t s = 0; s < sequences.size(); ++s)
        for (i32 i = 0; i < sequences[s].rows; ++i) ASSERT_NO_FATAL_FAILURE(expect_row(s, i, h));
      for (i32 row = query_starts.back(); varlen && row < query_rows; ++row) {
        ASSERT_EQ(lse[static_cast<std::size_t>(h * query_rows + row)], -std::numeric_limits<float>::infinity());
        for (i32 x = 0; x < dv; ++x) ASSERT_EQ(value(o[static_cast<std::size_t>((row * heads + h) * dv + x)]), 0.f);
      }
    }
  }
};

/// A varlen call with one number of its lengths changed: what a sequence that breaks a rule gets, and what is said of it.
inline void expect_breach(std::vector<i32> WholeCall::*lengths, std::size_t index, i32 value, std::size_t sequence,
                          const CallStatus& status) {
  WholeCall call(true, {{0, 20, 20, 0, 90}, {20, 33, 40, 93, 11}, {60, 70, 70, 107, 60}});
  i32 found[4] = {};
  call.args.status = found;
  (call.*lengths)[index] = value;
  const bool bounds = lengths == &WholeCall::query_starts;  // then no row can be told whose it is
  call.run(2, true);
  EXPECT_EQ(found[0], status.code);
  EXPECT_EQ(found[1], status.sequence);
  EXPECT_EQ(found[2], status.value);
  EXPECT_EQ(found[3], status.limit);
  for (std::size_t s = 0; s < call.sequences.size(); ++s) {
    const WholeCall::Lengths& at = call.sequences[s];
    for (i32 i = 0; i < at.rows; ++i)
      for (i32 h = 0; h < call.heads; ++h) {
        if (!bounds && s != sequence) {
          ASSERT_NO_FATAL_FAILURE(call.expect_row(s, i, h));
          continue;
        }
        const i32 row = at.first_query + i;
        ASSERT_TRUE(std::isnan(call.lse[static_cast<std::size_t>(h * call.query_rows + row)])) << s << " " << i;
        for (i32 x = 0; x < call.dv; ++x)
          ASSERT_TRUE(
              std::isnan(WholeCall::value(call.o[static_cast<std::size_t>((row * call.heads + h) * call.dv + x)])))
              << s << " " << i;
      }
  }
}

inline void expect_whole_call(bool varlen, const Mask& mask, u32 blocks, bool counted) {
  // first query, used ones, rows, first key, keys; a sequence without keys, one without queries, one of two blocks of
  // queries.
  const std::vector<WholeCall::Lengths> packed{
      {0, 20, 20, 0, 90}, {20, 0, 0, 93, 11}, {20, 131, 140, 107, 2}, {160, 70, 70, 112, 149}};
  const std::vector<WholeCall::Lengths> dense{{0, 133, 140, 0, 97}, {140, 60, 140, 150, 142}};
  WholeCall call(varlen, varlen ? packed : dense);
  call.args.visibility = mask;
  call.run(blocks, counted);
  call.expect_all();
}
