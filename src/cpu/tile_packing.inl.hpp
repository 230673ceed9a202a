// From tensors of any type and stride to tiles of the compute type, and back. Part of tile_kernels.inl.hpp.

namespace narrows::cpu {
namespace {

template <class Out, class In> inline Out loaded(const In* source) {
  In value;
  __builtin_memcpy(&value, source, sizeof value);
  return static_cast<Out>(value);
}

template <class T> T element(const std::byte* p, DType dtype) {
  switch (dtype) {
    case DType::fp16:
      return static_cast<T>(half_to_float(loaded<unsigned short>(reinterpret_cast<const unsigned short*>(p))));
    case DType::bf16:
      return static_cast<T>(bfloat_to_float(loaded<unsigned short>(reinterpret_cast<const unsigned short*>(p))));
    case DType::fp32: return loaded<T>(reinterpret_cast<const float*>(p));
    default: return loaded<T>(reinterpret_cast<const double*>(p));
  }
}

inline i64 size_of(DType dtype) { return dtype == DType::fp64 ? 8 : dtype == DType::fp32 ? 4 : 2; }

// The consecutive elements of a row; returns how many were done here.
inline i64 convert_consecutive(const std::byte* row, DType dtype, i64 count, float* out) {
  i64 done = 0;
  if (dtype == DType::fp32) {
    __builtin_memcpy(out, row, static_cast<std::size_t>(count) * sizeof(float));
    done = count;
  } else if (dtype == DType::bf16) {
    const unsigned short* source = reinterpret_cast<const unsigned short*>(row);
    for (; done < count; ++done) out[done] = bfloat_to_float(source[done]);
  } else if (dtype == DType::fp16) {
    for (; done + kLanes<float> <= count; done += kLanes<float>) {
      const FloatVector values = Isa::from_half(reinterpret_cast<const unsigned short*>(row) + done);
      __builtin_memcpy(out + done, &values, sizeof values);
    }
  }
  return done;
}

inline i64 convert_consecutive(const std::byte* row, DType dtype, i64 count, double* out) {
  if (dtype != DType::fp64) return 0;
  __builtin_memcpy(out, row, static_cast<std::size_t>(count) * sizeof(double));
  return count;
}

template <class T> void convert(const std::byte* row, i64 stride, DType dtype, i64 count, T* out) {
  i64 done = stride == size_of(dtype) ? convert_consecutive(row, dtype, count, out) : 0;
  for (; done < count; ++done) out[done] = element<T>(row + done * stride, dtype);
}

template <class T> void convert_or_clear(const Rows& source, i64 row, i64 from, i64 count, T* out) {
  const std::byte* p = row < source.count ? source.row[row] : nullptr;
  if (p)
    convert(p + from * source.stride, source.stride, source.dtype, count, out);
  else
    for (i64 x = 0; x < count; ++x) out[x] = T{0};
}

inline void store_consecutive(const float* values, i64 count, std::byte* out, DType dtype) {
  if (dtype == DType::fp32) {
    __builtin_memcpy(out, values, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  if (dtype == DType::fp64) {
    double* target = reinterpret_cast<double*>(out);
    for (i64 x = 0; x < count; ++x) target[x] = values[x];
    return;
  }
  unsigned short* target = reinterpret_cast<unsigned short*>(out);
  i64 done = 0;
  if (dtype == DType::bf16) {
    for (; done < count; ++done) target[done] = float_to_bfloat(values[done]);
    return;
  }
  for (; done + kLanes<float> <= count; done += kLanes<float>) Isa::to_half(at(values + done), target + done);
  for (; done < count; ++done) target[done] = float_to_half(values[done]);
}

// Through a float where the type is narrower; count is at most kStored.
constexpr i64 kStored = 64;
inline void store_consecutive(const double* values, i64 count, std::byte* out, DType dtype) {
  if (dtype == DType::fp64) {
    __builtin_memcpy(out, values, static_cast<std::size_t>(count) * sizeof(double));
    return;
  }
  alignas(kVectorBytes) float narrow[kStored];
  for (i64 x = 0; x < count; ++x) narrow[x] = static_cast<float>(values[x]);
  store_consecutive(narrow, count, out, dtype);
}

template <class T> void store(const T* row, T factor, i64 count, std::byte* out, i64 stride, DType dtype) {
  alignas(kVectorBytes) T values[kStored];
  const i64 size = size_of(dtype);
  for (i64 from = 0; from < count; from += kStored) {
    const i64 chunk = count - from < kStored ? count - from : kStored;
    for (i64 x = 0; x < chunk; ++x) values[x] = row[from + x] * factor + T{0};
    if (stride == size) {
      store_consecutive(values, chunk, out + from * size, dtype);
      continue;
    }
    alignas(8) std::byte converted[kStored * sizeof(double)];
    store_consecutive(values, chunk, converted, dtype);
    for (i64 x = 0; x < chunk; ++x)
      __builtin_memcpy(out + (from + x) * stride, converted + x * size, static_cast<std::size_t>(size));
  }
}

template <class T> bool all_finite(const T* values, i64 count) {
  Vector<T> sum = {};
  for (i64 x = 0; x < count; x += kLanes<T>) sum += at(values + x) * T{0};
  bool finite = true;
  for (int lane = 0; lane < kLanes<T>; ++lane) finite = finite && sum[lane] == T{0};
  return finite;
}

// --------------------------------------------------------------------------------------------------------------- packing

template <class T> constexpr int kColumns = 2 * kLanes<T>;

// rows x length to [length][Width]: in pieces that stay in L1 between the conversion and the transposition.
template <int Width, class T> void transpose(const Rows& source, i64 first, T sign, T* out) {
  constexpr i64 kPiece = 64;
  T piece[Width][kPiece];
  for (i64 from = 0; from < source.length; from += kPiece) {
    const i64 count = source.length - from < kPiece ? source.length - from : kPiece;
    for (int r = 0; r < Width; ++r) convert_or_clear(source, first + r, from, count, piece[r]);
    for (i64 x = 0; x < count; ++x)
      for (int r = 0; r < Width; ++r) out[(from + x) * Width + r] = piece[r][x] * sign;
  }
}

template <class T> void pack_query(const Rows& source, T sign, T* panel) {
  transpose<Isa::kRows>(source, 0, sign, panel);
}

template <class T> void pack_keys(const Rows& source, T* strips) {
  for (i64 first = 0; first < source.count; first += kColumns<T>)
    transpose<kColumns<T>>(source, first, T{1}, strips + first * source.length);
}

template <class T> void pack_values(const Rows& source, T* strips) {
  const i64 keys = (source.count + kColumns<T> - 1) / kColumns<T> * kColumns<T>;
  for (i64 from = 0; from < source.length; from += kColumns<T>) {
    const i64 count = source.length - from < kColumns<T> ? source.length - from : i64{kColumns<T>};
    T* strip = strips + from * keys;
    for (i64 key = 0; key < keys; ++key, strip += kColumns<T>) {
      convert_or_clear(source, key, from, count, strip);
      for (i64 x = count; x < kColumns<T>; ++x) strip[x] = T{0};
    }
  }
}

}  // namespace
}  // namespace narrows::cpu
