// Rows of any type and stride to T, and back. Part of tile_kernels.inl.hpp.

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

// Short rows, for which a call of memcpy costs more than the copy.
template <class T> inline void copy(const T* source, i64 count, T* out) {
  i64 done = 0;
  for (; done + kLanes<T> <= count; done += kLanes<T>) store_anywhere<T>(out + done, load_anywhere(source + done));
  for (; done < count; ++done) out[done] = loaded<T>(source + done);
}

// The consecutive elements of a row; returns how many were done here.
inline i64 convert_consecutive(const std::byte* row, DType dtype, i64 count, float* out) {
  i64 done = 0;
  if (dtype == DType::fp32) {
    copy(reinterpret_cast<const float*>(row), count, out);
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
  copy(reinterpret_cast<const double*>(row), count, out);
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

// As prefetch_row of prefetch.hpp, which this text may not include.
inline void prefetch_row(const Rows& source, i64 row) {
  if (row >= source.count || !source.row[row]) return;
  const i64 bytes = source.length * (source.stride < 0 ? -source.stride : source.stride);
  const std::byte* const start = source.stride < 0 ? source.row[row] - bytes : source.row[row];
  for (i64 byte = 0; byte < bytes; byte += 64) __builtin_prefetch(start + byte);
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

template <class T> constexpr DType kOwnType = sizeof(T) == sizeof(float) ? DType::fp32 : DType::fp64;

template <class T> void store(const T* row, T factor, i64 count, std::byte* out, i64 stride, DType dtype) {
  if (dtype == kOwnType<T> && stride == static_cast<i64>(sizeof(T))) {
    T* const target = reinterpret_cast<T*>(out);
    i64 done = 0;
    for (; done + kLanes<T> <= count; done += kLanes<T>)
      store_anywhere<T>(target + done, load_anywhere(row + done) * factor + T{0});
    for (; done < count; ++done) {
      const T value = row[done] * factor + T{0};
      __builtin_memcpy(target + done, &value, sizeof value);
    }
    return;
  }
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

}  // namespace
}  // namespace narrows::cpu
