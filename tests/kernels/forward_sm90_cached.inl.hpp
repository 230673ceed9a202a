// Included behind forward_sm90.inl.hpp: calls of the sm90 kernel whose keys lie in a cache or in pages. Slots that no row
// may see hold NaN, and the table's entries of pages without a key that one sees are no pages.

struct CacheShape {
  i32 page = 0;                          // slots; 0: rows of a cache
  bool padded = false, indexed = false;  // leftpad is given; cache_batch_idx is
};

struct CachedCall : WholeCall {
  CacheShape shape;
  i32 capacity, rows, pages_of_row;  // rows: of the cache or of the table
  std::vector<i32> table, filled, leftpad, row_of;
  i32 status[4] = {};

  static i32 padding(const CacheShape& shape, std::size_t s) { return shape.padded ? 5 + 14 * static_cast<i32>(s) : 0; }
  static i32 slots(const std::vector<Lengths>& lengths, const CacheShape& shape) {
    i32 most = 0;
    for (std::size_t s = 0; s < lengths.size(); ++s) most = max_of(most, padding(shape, s) + lengths[s].keys);
    most += 3;
    return shape.page ? ceil_div(most, shape.page) * shape.page : most;
  }
  /// The pool has more pages than the tables need.
  static std::vector<i32> random_table(i32 entries) {
    std::vector<i32> pages(static_cast<std::size_t>(entries + 2));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(11));
    pages.resize(static_cast<std::size_t>(entries));
    return pages;
  }
  static i32 cache_row(const CacheShape& shape, std::size_t s, std::size_t sequences) {
    return static_cast<i32>(shape.indexed ? sequences - s : s);  // row 0 is nobody's
  }
  static i32 cache_rows(const CacheShape& shape, std::size_t sequences) {
    return static_cast<i32>(sequences) + (shape.indexed ? 1 : 0);
  }
  static Places cached_places(const std::vector<Lengths>& lengths, const CacheShape& shape) {
    Places places;
    const i32 slots_of_row = slots(lengths, shape), pages = shape.page ? slots_of_row / shape.page : 0;
    const std::vector<i32> table = random_table(cache_rows(shape, lengths.size()) * pages);
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      const i32 row = cache_row(shape, s, lengths.size());
      places.emplace_back();
      for (i32 j = 0; j < lengths[s].keys; ++j) {
        const i32 slot = padding(shape, s) + j;
        places.back().push_back(shape.page
                                    ? table[static_cast<std::size_t>(row * pages + slot / shape.page)] * shape.page +
                                          slot % shape.page
                                    : row * slots_of_row + slot);
      }
    }
    return places;
  }
  static i32 memory_rows(const std::vector<Lengths>& lengths, const CacheShape& shape) {
    const i32 all = cache_rows(shape, lengths.size()) * slots(lengths, shape);
    return shape.page ? all + 2 * shape.page : all;
  }

  CachedCall(bool varlen_, const std::vector<Lengths>& lengths, const CacheShape& shape_)
      : WholeCall(varlen_, lengths, cached_places(lengths, shape_), memory_rows(lengths, shape_)),
        shape(shape_),
        capacity(slots(lengths, shape_)),
        rows(cache_rows(shape_, lengths.size())),
        pages_of_row(shape_.page ? capacity / shape_.page : 0),
        table(random_table(rows * pages_of_row)) {
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      leftpad.push_back(padding(shape, s));
      filled.push_back(leftpad.back() + sequences[s].keys);
      row_of.push_back(cache_row(shape, s, sequences.size()));
    }
  }

  /// Entries that nobody may read are no pages.
  void spoil_table() {
    std::vector<bool> needed(table.size());
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (i32 j = 0; j < sequences[s].keys; ++j)
        if (is_seen(s, j))
          needed[static_cast<std::size_t>(row_of[s] * pages_of_row + (leftpad[s] + j) / shape.page)] = true;
    for (std::size_t entry = 0; entry < table.size(); ++entry)
      if (!needed[entry]) table[entry] = entry % 2 ? -7 : 1 << 30;
  }

  void describe_all() override {
    WholeCall::describe_all();
    args.seqused_k = {};
    args.cu_seqlens_k = {};
    const i32 kv_heads = heads / group, kept = shape.page ? shape.page : capacity;
    args.box_rows = shape.page ? std::gcd(shape.page, kBlockKeys) : kBlockKeys;
    args.boxes = kBlockKeys / args.box_rows;
    const auto set = [&](TensorArg& arg, TensorMap& map, i32 columns) {
      const i64 head = 2 * i64{columns}, slot = kv_heads * head;
      for (const auto& [axis, stride] : {std::pair{0, kept * slot}, {1, slot}, {2, head}, {3, i64{2}}})
        arg.strides[axis] = stride;
      map =
          describe({arg.data, {columns, kept, kv_heads, key_rows / kept}, {2, slot, head, kept * slot}, args.box_rows});
    };
    set(args.k, args.k_map, d);
    set(args.v, args.v_map, dv);
    args.status = status;
    DecodeArgs& cache = args.cache;
    static_cast<CallArgs&>(cache) = args;
    cache.k = args.k;
    cache.v = args.v;
    cache.cached = true;
    cache.cache_seqlens = {filled.data(), 1};
    if (shape.padded) cache.leftpad = {leftpad.data(), 1};
    if (shape.indexed) cache.cache_batch_idx = {row_of.data(), 1};
    cache.capacity = capacity;
    cache.cache_rows = rows;
    if (shape.page) cache.table = table.data(), cache.table_row = pages_of_row, cache.table_stride = 1;
    cache.page_size = max_of(shape.page, 1);
    cache.by_page = divider(cache.page_size);
    cache.pages = shape.page ? key_rows / shape.page : 0;
  }
};

inline const std::vector<WholeCall::Lengths>& cached_lengths(bool varlen) {
  // first query, used ones, rows, first key, keys: none of a sequence, no queries, none of them used, two blocks of
  // queries.
  static const std::vector<WholeCall::Lengths> packed{
      {0, 20, 20, 0, 90}, {20, 0, 0, 0, 11}, {20, 131, 140, 0, 2}, {160, 6, 6, 0, 0}, {166, 70, 70, 0, 149}};
  static const std::vector<WholeCall::Lengths> dense{
      {0, 133, 140, 0, 97}, {140, 60, 140, 1, 142}, {280, 0, 140, 2, 61}};
  return varlen ? packed : dense;
}

inline void expect_cached_call(bool varlen, const CacheShape& shape, const Mask& mask, u32 blocks = 2) {
  SCOPED_TRACE(testing::Message() << (varlen ? "varlen" : "dense") << ", pages of " << shape.page << " " << shape.padded
                                  << shape.indexed);
  CachedCall call(varlen, cached_lengths(varlen), shape);
  call.args.visibility = mask;
  if (shape.page) call.spoil_table();
  call.run(blocks, true);
  EXPECT_EQ(call.status[0], 0);
  call.expect_all();
}

/// Sequence 1 breaks a rule: its rows are NaN, the others' what they would be.
inline void expect_refused(CachedCall& call, const CallStatus& status) {
  call.run(2, true);
  EXPECT_EQ(call.status[0], status.code);
  EXPECT_EQ(call.status[1], status.sequence);
  EXPECT_EQ(call.status[2], status.value);
  EXPECT_EQ(call.status[3], status.limit);
  for (i32 h = 0; h < call.heads; ++h) {
    for (i32 i = 0; i < call.sequences[0].rows; ++i) ASSERT_NO_FATAL_FAILURE(call.expect_row(0, i, h));
    for (i32 i = 0; i < call.sequences[1].rows; ++i) {
      ASSERT_TRUE(std::isnan(call.lse[static_cast<std::size_t>((call.heads + h) * call.sequences[0].rows + i)])) << i;
      const i32 row = call.sequences[1].first_query + i;
      ASSERT_TRUE(std::isnan(
          WholeCall::value(call.o[static_cast<std::size_t>((row * call.heads + h) * call.dv + call.dv - 1)])))
          << i;
    }
  }
}

/// The sequence's row would be the one that is nobody's, whose entries are no pages.
inline void expect_no_row(const CacheShape& shape) {
  CachedCall call(false, cached_lengths(false), shape);
  call.spoil_table();
  call.row_of[1] = -3;
  expect_refused(call, {static_cast<i32>(StatusCode::cache_batch_idx), 1, -3, call.rows - 1});
}
