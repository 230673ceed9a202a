// A call of the whole decode kernel of family sm80 on the host, and of the one that appends before it, beside the definition. What
// includes this has the constants of a program.
#include "kernels/append_sm80.cu"
#include "kernels/decode_sm80.cu"

namespace narrows {

constexpr i32 kHeads = 4, kGroup = 2, kKvHeads = kHeads / kGroup, kWidth = 24, kValueWidth = 20, kPage = 16;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t kMemory =
    kBlockQueries * kQueryStride + 4 * kWarps * kBlockQueries * kOutputStride + kThreads * sizeof(LineSequence);

struct Array {
  std::vector<float> x;
  TensorArg arg;

  /// (rows, places, heads, width); a place of a row is `place` floats from the next.
  void make(i32 rows, i32 places, i32 heads, i32 width, float value) {
    x.assign(static_cast<std::size_t>(rows) * static_cast<std::size_t>(places * heads * width), value);
    arg = {reinterpret_cast<char*>(x.data()),
           {4 * i64{places} * heads * width, 4 * i64{heads} * width, 4 * i64{width}, 4},
           Element::fp32};
  }
  float& at(i32 row, i32 place, i32 head, i32 column) {
    return *reinterpret_cast<float*>(arg.data + row * arg.strides[0] + place * arg.strides[1] + head * arg.strides[2] +
                                     column * arg.strides[3]);
  }
};

/// Of keys in pages of 16, those of sequence s in pages that follow each other by the number of sequences. Slots that
/// nobody fills hold NaN.
struct CachedCall {
  std::mt19937 random{11};
  std::vector<i32> filled, starts{0}, table, begins, ends, refused;
  i32 lines = 1;              // of a plain call: into which its rows are dealt
  i32 queries, fresh, pages;  // queries: of a sequence; fresh: new keys of each; pages: of a sequence
  Array q, k, v, o, lse, k_new, v_new;
  std::vector<float> outputs;
  std::vector<RowSum> sums;
  std::vector<u64> tickets;
  i32 status[4] = {};
  DecodeArgs args;
  std::function<void()> write_before;

  CachedCall(std::vector<i32> filled_, i32 queries_, i32 fresh_, bool varlen = false)
      : filled(std::move(filled_)), queries(queries_), fresh(fresh_) {
    const i32 batch = static_cast<i32>(filled.size());
    pages = ceil_div((batch ? *std::max_element(filled.begin(), filled.end()) : 0) + fresh, kPage) + 1;
    for (i32 s = 0; s < batch; ++s) {
      starts.push_back(starts.back() + queries);
      for (i32 page = 0; page < pages; ++page) table.push_back(page * batch + (s + 1) % batch);
    }
    const i32 rows = varlen ? starts.back() + 5 : queries;  // rows behind the last sequence
    q.make(varlen ? 1 : batch, rows, kHeads, kWidth, 0);
    o.make(varlen ? 1 : batch, rows, kHeads, kValueWidth, kNaN);
    lse.make(varlen ? 1 : batch, kHeads, rows, 1, kNaN);
    k.make(batch * pages, kPage, kKvHeads, kWidth, kNaN);
    v.make(batch * pages, kPage, kKvHeads, kValueWidth, kNaN);
    k_new.make(batch, fresh, kKvHeads, kWidth, 0);
    v_new.make(batch, fresh, kKvHeads, kValueWidth, 0);
    std::normal_distribution<float> normal;
    for (Array* array : {&q, &k_new, &v_new})
      for (float& x : array->x) x = normal(random);
    for (i32 s = 0; s < batch; ++s)
      for (i32 slot = 0; slot < filled[static_cast<std::size_t>(s)]; ++slot)
        for (i32 head = 0; head < kKvHeads; ++head) {
          for (i32 x = 0; x < kWidth; ++x) k.at(page_of(s, slot), slot % kPage, head, x) = normal(random);
          for (i32 x = 0; x < kValueWidth; ++x) v.at(page_of(s, slot), slot % kPage, head, x) = normal(random);
        }
    describe(varlen, rows);
  }

  i32 page_of(i32 s, i32 slot) const { return table[static_cast<std::size_t>(s * pages + slot / kPage)]; }

  void describe(bool varlen, i32 rows) {
    args.q = q.arg, args.k = k.arg, args.v = v.arg, args.o = o.arg;
    args.lse = {lse.arg.data, {lse.arg.strides[0], lse.arg.strides[1], lse.arg.strides[2], 0}, Element::fp32};
    if (varlen) args.q.strides[0] = args.o.strides[0] = args.lse.strides[0] = 0;
    if (varlen) args.cu_seqlens_q = {starts.data(), 1};
    if (fresh) args.k_new = k_new.arg, args.v_new = v_new.arg;
    args.batch = static_cast<i32>(filled.size());
    args.heads = kHeads, args.group = kGroup, args.kv_heads = kKvHeads;
    args.query_rows = rows;
    args.head_dim = kWidth, args.value_dim = kValueWidth;
    args.score_rows = args.score_keys = 0x7fffffff;
    args.units = fused_units<float>(0.4);
    args.rules = score_rules<float>(0.4, 0.0, 0.f);
    args.cached = args.whole_columns = true;
    args.cache_seqlens = {filled.data(), 1};
    args.new_rows = fresh;
    args.capacity = pages * kPage;
    args.cache_rows = args.batch;
    args.table = table.data();
    args.table_row = pages, args.table_stride = 1;
    args.page_size = kPage, args.pages = args.batch * pages;
    args.by_page = divider(kPage), args.by_group = divider(kGroup), args.by_tile_rows = divider(kKvHeads);
    args.status = status;
    refused.assign(filled.size(), -1);
    if (fresh) args.refused = refused.data();
  }

  /// As cuda/decode.cpp does of a call whose sequences differ in lengths alone.
  i32 describe_plain() {
    const i32 rows = packed_tiles(args, queries) * kKvHeads;
    args.by_rows = divider(rows * args.batch), args.by_sequence_rows = divider(rows);
    args.by_lines = divider(lines), args.line_rows = rows / lines;
    args.by_splits = divider(splits_of(args.capacity / kBlockKeys, most_splits(rows * args.batch, args.line_blocks)));
    args.plain_filled = args.capacity - fresh;
    args.cuts_alike = true;
    return max_of(args.by_rows.divisor * args.by_splits.divisor, args.line_blocks);
  }

  void run(i32 blocks, bool plain = false) {
    args.line_blocks = blocks;
    const i32 launched = plain ? describe_plain() : blocks;
    const std::size_t slots = 4000;
    outputs.assign(slots * kBlockQueries * kColumns, kNaN);
    sums.assign(slots * kBlockQueries, {kNaN, kNaN});
    tickets.assign(slots, ~u64{0});
    args.outputs = outputs.data(), args.sums = sums.data(), args.tickets = tickets.data();
    if (fresh) launch([&] { append_sm80(args); }, 2 * args.batch);
    launch([&] { decode_sm80(args); }, launched);
  }
  /// A plain call whose thread blocks begin while another kernel runs. write(ended): what that one leaves, before and at its end.
  template <class Write> void run_after(i32 blocks, const Write& write) {
    write_before = [write] { write(false); };
    ::narrows::test::previous_kernel = [write] { write(true); };
    run(blocks, true);
    ::narrows::test::previous_kernel = nullptr;
  }
  template <class Kernel> void launch(const Kernel& kernel, i32 blocks) const {
    for (i32 index = 0; index < blocks; ++index) {
      if (write_before) write_before();
      ::narrows::test::Block block(kWarps, kMemory);
      std::fill(block.memory.begin(), block.memory.end(), static_cast<unsigned char>(0xff));
      block.run(kernel, static_cast<unsigned>(index), static_cast<unsigned>(blocks));
    }
  }

  bool varlen() const { return args.cu_seqlens_q.data != nullptr; }
  float lse_of(i32 s, i32 i, i32 h) {
    return varlen() ? lse.at(0, h, starts[static_cast<std::size_t>(s)] + i, 0) : lse.at(s, h, i, 0);
  }
  float o_of(i32 s, i32 i, i32 h, i32 x) {
    return varlen() ? o.at(0, starts[static_cast<std::size_t>(s)] + i, h, x) : o.at(s, i, h, x);
  }
  Keys seen_by(i32 s, i32 i) const {
    SequenceFacts facts{};
    facts.sequence = s;
    facts.first_query = varlen() ? starts[static_cast<std::size_t>(s)] : 0;
    facts.keys = filled[static_cast<std::size_t>(s)] + fresh;
    facts.shift = facts.keys - queries;
    return seen_keys(args, facts, i);
  }

  /// The rows of sequence s are what the definition says.
  void expect_right(i32 s) {
    SCOPED_TRACE(testing::Message() << "sequence " << s);
    for (i32 i = 0; i < queries; ++i)
      for (i32 h = 0; h < kHeads; ++h) ASSERT_NO_FATAL_FAILURE(expect_row(s, i, h)) << "row " << i << " head " << h;
  }
  void expect_row(i32 s, i32 i, i32 h) {
    const Keys seen = seen_by(s, i);
    double most = -std::numeric_limits<double>::infinity(), sum = 0;
    std::vector<double> logits, result(kValueWidth);
    for (i32 j = seen.begin; j < seen.end; ++j) {
      double dot = 0;
      for (i32 x = 0; x < kWidth; ++x)
        dot +=
            static_cast<double>(varlen() ? q.at(0, starts[static_cast<std::size_t>(s)] + i, h, x) : q.at(s, i, h, x)) *
            static_cast<double>(k.at(page_of(s, j), j % kPage, h / kGroup, x));
      logits.push_back(0.4 * dot);
      most = std::max(most, logits.back());
    }
    for (i32 j = seen.begin; j < seen.end; ++j) {
      const double weight = std::exp(logits[static_cast<std::size_t>(j - seen.begin)] - most);
      sum += weight;
      for (i32 x = 0; x < kValueWidth; ++x)
        result[static_cast<std::size_t>(x)] +=
            weight * static_cast<double>(v.at(page_of(s, j), j % kPage, h / kGroup, x));
    }
    if (seen.begin >= seen.end) {
      ASSERT_EQ(lse_of(s, i, h), -std::numeric_limits<float>::infinity());
      for (i32 x = 0; x < kValueWidth; ++x) ASSERT_EQ(o_of(s, i, h, x), 0.f);
      return;
    }
    ASSERT_NEAR(lse_of(s, i, h), most + std::log(sum), 2e-5);
    for (i32 x = 0; x < kValueWidth; ++x)
      ASSERT_NEAR(o_of(s, i, h, x), result[static_cast<std::size_t>(x)] / sum, 2e-5);
  }
  void expect_nan(i32 s) {
    for (i32 i = 0; i < queries; ++i)
      for (i32 h = 0; h < kHeads; ++h) {
        ASSERT_TRUE(std::isnan(lse_of(s, i, h))) << "sequence " << s << " row " << i << " head " << h;
        for (i32 x = 0; x < kValueWidth; ++x) ASSERT_TRUE(std::isnan(o_of(s, i, h, x))) << "row " << i << " head " << h;
      }
  }
  void expect_status(const std::array<i32, 4>& expected) const {
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(status[i], expected[i]) << "number " << i;
  }
  /// Whether some new key of a sequence is in the cache.
  bool appended(i32 s) {
    for (i32 t = 0; t < fresh; ++t) {
      const i32 slot = filled[static_cast<std::size_t>(s)] + t, page = page_of(s, slot);
      if (page >= 0 && k.at(page, slot % kPage, 0, 0) == k_new.at(s, t, 0, 0)) return true;
    }
    return false;
  }
};

void expect_all(CachedCall& call) {
  EXPECT_EQ(call.status[0], 0);
  for (i32 s = 0; s < call.args.batch; ++s) ASSERT_NO_FATAL_FAILURE(call.expect_right(s));
}

}  // namespace narrows
