// Narrows: exact attention, softmax(scale * Q K^T + bias) V, in one crossing of the memory bridge.
//
// Shapes: b batch, h query heads, hk kv heads (h % hk == 0), sq / sk query / key sequence length, d head dim of q and k,
// dv head dim of v and o. Tensors are views: any strides, nothing is copied by the caller.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#if defined(_WIN32)
#error "Narrows is built for Linux and other POSIX systems"
#endif
#define NARROWS_API __attribute__((visibility("default")))

namespace narrows {

// ---------------------------------------------------------------------------------------------------------------- errors

enum class ErrorCode : std::uint8_t {
  invalid_value,    // a size, stride, option or content that breaks a rule of the contract
  invalid_type,     // a dtype or device that the argument cannot have
  not_implemented,  // within the contract, but no family of this build computes it; the text lists each with its reason
  out_of_memory,
  invalid_file,
  internal,
};

/// The one exception type. The text names the argument, its value, the rule, and the nearest legal value where there is one.
class NARROWS_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// --------------------------------------------------------------------------------------------------------------- tensors

enum class DType : std::uint8_t { fp16, bf16, fp32, fp64, int32, int64, uint8, boolean };
enum class DeviceKind : std::uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Up to five sizes or strides, outermost first.
class Dims {
 public:
  static constexpr std::size_t kMaxRank = 5;

  constexpr Dims() = default;
  constexpr Dims(std::initializer_list<std::int64_t> values) {
    for (const std::int64_t value : values) push_back(value);
  }
  /// Throws std::length_error beyond kMaxRank.
  constexpr void push_back(std::int64_t value) {
    if (rank_ == kMaxRank) throw std::length_error("narrows::Dims holds at most 5 values");
    values_[rank_++] = value;
  }
  constexpr std::size_t rank() const { return rank_; }
  constexpr bool empty() const { return rank_ == 0; }
  constexpr std::int64_t operator[](std::size_t axis) const { return values_[axis]; }
  constexpr std::int64_t& operator[](std::size_t axis) { return values_[axis]; }
  constexpr const std::int64_t* begin() const { return values_.data(); }
  constexpr const std::int64_t* end() const { return values_.data() + rank_; }
  friend constexpr bool operator==(const Dims& a, const Dims& b) {
    if (a.rank_ != b.rank_) return false;
    for (std::size_t axis = 0; axis < a.rank_; ++axis)
      if (a.values_[axis] != b.values_[axis]) return false;
    return true;
  }

 private:
  std::array<std::int64_t, kMaxRank> values_{};
  std::size_t rank_ = 0;
};

/// A view of memory that the caller owns. A tensor of rank 0 (the default) means "not given".
/// A tensor passed as an input is never written, except k and v of a cache call that appends.
struct Tensor {
  void* data = nullptr;  // may be null when a size is 0, and in explain(), which reads no element
  DType dtype = DType::fp32;
  Dims shape{};
  Dims strides{};  // in elements; empty = row-major without gaps. The stride of a size-1 dimension means nothing
  Device device{};

  bool given() const { return !shape.empty(); }
};

template <class T> inline constexpr std::optional<DType> kDTypeOf = std::nullopt;
template <> inline constexpr std::optional<DType> kDTypeOf<float> = DType::fp32;
template <> inline constexpr std::optional<DType> kDTypeOf<double> = DType::fp64;
template <> inline constexpr std::optional<DType> kDTypeOf<std::int32_t> = DType::int32;
template <> inline constexpr std::optional<DType> kDTypeOf<std::int64_t> = DType::int64;
template <> inline constexpr std::optional<DType> kDTypeOf<std::uint8_t> = DType::uint8;
template <> inline constexpr std::optional<DType> kDTypeOf<bool> = DType::boolean;

/// A CPU tensor over an array of a C++ type. 16-bit floats have none: fill in a Tensor with their dtype.
template <class T> Tensor view(T* data, const Dims& shape, const Dims& strides = {}) {
  using Element = std::remove_const_t<T>;
  static_assert(kDTypeOf<Element>.has_value(), "narrows::view takes float, double, int32_t, int64_t, uint8_t or bool");
  return {const_cast<Element*>(data), *kDTypeOf<Element>, shape, strides, Device{}};
}

// --------------------------------------------------------------------------------------------------------------- options

enum class Causal : std::uint8_t { none, bottom_right, top_left };

/// Keys [p - left, p + right] around the query's position p, both ends included; -1 = unlimited.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;
};

/// Where this call stands in a larger one: first batch row, head, query and key, and the query heads of the whole model
/// (0 = this call's h). Dropout draws by global position, so that shards drop what the whole would.
struct Origin {
  std::int64_t b = 0, h = 0, i = 0, j = 0, H = 0;
};

/// A 64-bit number given now, or an int64 tensor of one element that is read when the call runs.
struct Number {
  std::uint64_t value = 0;
  Tensor tensor{};
  Number() = default;
  Number(std::uint64_t value_) : value(value_) {}
  Number(const Tensor& tensor_) : tensor(tensor_) {}
};

/// Everything that is not q, k, v or a result. All rules intersect; a default means "off".
/// (Members say {} so that a designated initialiser may leave them out without a warning.)
struct Options {
  // Scores: scale * Q K^T -> softcap -> + ALiBi + bias -> mask -> softmax over keys and sink -> dropout -> P V.
  std::optional<double> scale{};  // default 1 / sqrt(d); any finite value
  double softcap = 0;             // cap * tanh(s / cap); 0 = off
  Tensor alibi_slopes{};          // (h) or (b, h), floats; adds -slope * |p - j|
  Tensor bias{};                  // floats, broadcasts to (b, h, sq, sk); -inf masks
  Tensor sinks{};                 // (h), floats: one more logit per head that has no value row; -inf = none

  // Which keys a query sees. Query i stands at position p = i + shift on the keys' axis.
  Causal causal = Causal::none;  // j <= p; bottom_right: shift = sk - sq, top_left: shift = 0
  Tensor shift{};                // (b) int32: the shift of each sequence; default sk - sq
  Window window{};
  std::int64_t chunk = 0;  // floor(j / chunk) == floor(p / chunk); 0 = off
  Tensor mask{};           // boolean, broadcasts to (b, h, sq, sk); true = may attend
  // (b, sq), varlen (total_q), int32: query i of its sequence sees keys key_begin[i] <= j < key_end[i] alone, j counted
  // from the sequence's first key. Any value, and either alone. Documents and prefixes are such intervals.
  Tensor key_begin{}, key_end{};

  // Dropout on P, the same mask on every backend.
  double dropout = 0;  // probability of dropping, [0, 1)
  Number seed{}, offset{};
  Origin origin{};

  // Lengths. Varlen: q (total_q, h, d) and k, v (total_k, hk, *) hold sequences end to end.
  // A GPU call's int32 tensors lie on its device and are read there when the kernel runs, never by the host: a sequence that
  // breaks a rule gets O and LSE of NaN, and `status` says which.
  Tensor cu_seqlens_q{}, cu_seqlens_k{};  // (b + 1) int32: sequence s is rows [cu[s], cu[s + 1])
  Tensor seqused_q{}, seqused_k{};        // (b) int32: rows used of each sequence

  // KV cache: k, v are the cache, (b_cache, capacity, hk, *) or with block_table pages (pages, page size, hk, *).
  Tensor cache_seqlens{};           // (b) int32: slots filled, leftpad included, before append
  Tensor block_table{};             // (b, pages per sequence) int32
  Tensor cache_batch_idx{};         // (b) int32: cache row of each sequence
  Tensor leftpad{};                 // (b) int32: slots skipped at the front
  Tensor k_new{}, v_new{};          // (b, s_new, hk, *) or varlen (total_new, hk, *): appended before attention
  Tensor cu_seqlens_k_new{};        // (b + 1) int32
  Tensor rotary_cos{};              // (positions, rotated / 2)
  Tensor rotary_sin{};              // as rotary_cos
  bool rotary_interleaved = false;  // pairs (2i, 2i + 1); false: (i, i + rotated / 2)
  Tensor rotary_base{};             // (b) int32: position of query 0; default cache_seqlens

  // How to compute. None changes the result beyond rounding.
  bool deterministic = false;  // gradients repeat bit for bit; on the CPU they always do
  bool batch_invariant = false;
  int num_splits = 0;         // of the keys; 0 = the plan decides
  Tensor workspace{};         // uint8: scratch that the caller owns
  Tensor status{};            // int32 (4) on the device: code (0 = every rule kept), sequence, value, limit
  bool check = false;         // or NARROWS_CHECK=1: synchronise and throw what `status` would say
  int threads = 0;            // CPU; 0 = NARROWS_THREADS, else every core
  void* stream = nullptr;     // GPU: a CUstream (cudaStream_t) of the tensors' device; null = the legacy default stream
  std::string_view family{};  // force a family by name; default NARROWS_FAMILY, else the fastest that accepts
};

struct Inputs {
  Tensor q{};  // (b, sq, h, d), varlen (total_q, h, d)
  Tensor k{};  // (b, sk, hk, d), varlen (total_k, hk, d), or a cache
  Tensor v{};  // (b, sk, hk, dv), varlen (total_k, hk, dv), or a cache
};

struct Outputs {
  Tensor o{};    // (b, sq, h, dv), varlen (total_q, h, dv); q's dtype
  Tensor lse{};  // optional: natural log-sum-exp of each row's logits, (b, h, sq), varlen (h, total_q); fp32 or fp64
};

struct BackwardInputs {
  Tensor q{}, k{}, v{};
  Tensor o{}, lse{};  // as forward wrote them
  Tensor dout{};      // gradient of o
  Tensor dlse{};      // optional: gradient of lse
};

struct Gradients {  // each optional; written, not added to
  Tensor dq{}, dk{}, dv{};
  Tensor dbias{};    // shape and dtype of bias
  Tensor dslopes{};  // shape and dtype of alibi_slopes
  Tensor dsinks{};   // shape and dtype of sinks
};

// ----------------------------------------------------------------------------------------------------------------- calls

/// O = attention(q, k, v) and, if given, the LSE. Everything is checked before anything is written. A row that sees no key
/// gets O = 0 and LSE = -inf (the sink with a sink). Safe to call from several threads at once. Throws Error.
///
/// On a GPU all tensors are on q's device. The work is put on options.stream and forward returns without waiting for it: their
/// memory must stay until it is done. The current device stays as it was. Kernels of Narrows may be begun while the kernel before
/// them still runs, and wait for its end before they use memory. A kernel of the caller's that follows begins when they have ended,
/// as ever; launched with programmatic stream serialization it may begin before, and must wait (griddepcontrol.wait) before it
/// reads their results or writes their inputs.
NARROWS_API void forward(const Inputs& in, const Outputs& out, const Options& options = {});

/// Does now what the first forward of this kind would do: on a GPU compiles and loads its kernel, so that it may be called while
/// a stream is captured. On the CPU there is nothing to do beyond checking. Data may be null but for a CPU's int32 tensors.
NARROWS_API void prepare(const Inputs& in, const Options& options = {});

/// The gradients that `out` asks for, from what forward read and wrote: P is computed again from q, k and the LSE, never
/// stored. options are forward's, seed and offset included. Rows that saw no key get dq = 0 and add nothing to the others.
/// Memory is linear in the sequence; on the CPU bits do not depend on the number of threads, on a GPU those of dq may differ
/// from call to call unless options.deterministic. GPU calls behave as forward's. Throws Error.
NARROWS_API void backward(const BackwardInputs& in, const Gradients& out, const Options& options = {});

/// As prepare, of the first backward of this kind, whichever gradients it asks for; with a bias, slopes and sinks theirs too.
/// o, dout and gradients count as laid out without gaps.
NARROWS_API void prepare_backward(const Inputs& in, const Options& options = {});

/// One row's attention over several sets of keys, from the (o, lse) that forward gave for each set: splits, shared prefixes,
/// ranks. All parts have the shapes, dtypes and device of `out`, whose lse is optional. A part that saw no key has
/// lse = -inf and is left out, whatever its o; all empty gives (0, -inf). sinks: (h), counted once here and by no part.
/// stream: a GPU's, which is not waited for; there are at most 32 parts on a GPU.
NARROWS_API void merge(std::span<const Outputs> parts, const Outputs& out, const Tensor& sinks = {},
                       void* stream = nullptr);

/// Gradients of merge: of each part's o and lse, and of the sinks.
struct MergeGradients {
  std::span<const Outputs> parts{};  // as many as merge had; either tensor may be left out
  Tensor dsinks{};
};
/// dout, dlse (optional): gradients of merge's results. The rest is as merge's; on a GPU 12 bytes of each row are allocated on the
/// stream meanwhile.
NARROWS_API void merge_backward(std::span<const Outputs> parts, const Tensor& dout, const Tensor& dlse,
                                const MergeGradients& out, const Tensor& sinks = {}, void* stream = nullptr);

/// Bytes of scratch that the call needs. Given that many in options.workspace it allocates nothing. Only shapes, lengths and
/// options matter: data may be null but for a CPU's int32 tensors.
NARROWS_API std::int64_t workspace_size(const Inputs& in, const Options& options = {});
NARROWS_API std::int64_t backward_workspace_size(const Inputs& in, const Options& options = {});

/// What a call costs, counted exactly from shapes, lengths and masks; no element of q, k, v is read. Lengths, key_begin
/// and key_end on a GPU are not read either: the counts are then those of the longest sequences that fit, at most.
struct Explanation {
  std::string problem;               // the facts in one line
  std::string family;                // that would run it
  std::string plan;                  // its decisions, a line each
  std::vector<std::string> refused;  // "family: reason"
  std::int64_t visible_pairs = 0;    // (query, key, head) triples that are computed by definition
  double flops = 0;
  std::int64_t fused_bytes = 0;         // compulsory traffic: each of q, k, v, o once
  std::int64_t three_kernel_bytes = 0;  // the same and S and P, written and read
  std::int64_t fused_memory = 0;        // bytes beside inputs and outputs
  std::int64_t three_kernel_memory = 0;
  double fused_intensity = 0;  // FLOP per byte
  double three_kernel_intensity = 0;
  double predicted_seconds = 0;
  double three_kernel_seconds = 0;
  std::string limited_by;  // "compute" or "memory"
  std::int64_t fused_l2_bytes =
      0;  // forward on a GPU, between L2 and multiprocessors: k, v once a block of query rows; else 0
  NARROWS_API std::string text() const;
};
NARROWS_API Explanation explain(const Inputs& in, const Options& options = {});

struct FamilyInfo {
  std::string name;
  bool available = false;
  std::string detail;  // what it runs on, or why it is not available
};
struct Info {
  std::string version;
  std::string cpu;
  std::string instruction_set;  // that the CPU family chose
  int threads = 0;
  std::vector<FamilyInfo> families;  // in the order of preference
};
NARROWS_API Info info();

NARROWS_API std::string_view version() noexcept;
NARROWS_API std::string_view name(DType dtype) noexcept;
NARROWS_API std::size_t item_size(DType dtype) noexcept;  // bytes

}  // namespace narrows
