/* Narrows from C: exact attention, softmax(scale * Q K^T + bias) V, in one crossing of the memory bridge.
 *
 * The C face of narrows.hpp, name for name; that header and the documentation say what each field does. C11 and C++.
 *
 *   #include <narrows/narrows.h>
 *   #include <stdio.h>
 *
 *   int main(void) {
 *     static float q[2 * 8 * 64], k[5 * 2 * 64], v[5 * 2 * 64], o[2 * 8 * 64];       // filled in by the caller
 *     narrows_inputs in = narrows_inputs_default();
 *     in.q = narrows_view(q, narrows_fp32, 4, (const int64_t[]){1, 2, 8, 64});       // (b, sq, h, d)
 *     in.k = narrows_view(k, narrows_fp32, 4, (const int64_t[]){1, 5, 2, 64});       // (b, sk, hk, d)
 *     in.v = narrows_view(v, narrows_fp32, 4, (const int64_t[]){1, 5, 2, 64});       // (b, sk, hk, dv)
 *     narrows_outputs out = narrows_outputs_default();
 *     out.o = narrows_view(o, narrows_fp32, 4, (const int64_t[]){1, 2, 8, 64});      // (b, sq, h, dv)
 *     narrows_options options = narrows_options_default();
 *     options.causal = narrows_causal_bottom_right;
 *     if (narrows_forward(&in, &out, &options) != narrows_ok) {
 *       fprintf(stderr, "%s\n", narrows_last_error());
 *       return 1;
 *     }
 *     printf("o[0] = %g\n", (double)o[0]);
 *     return 0;
 *   }
 *
 * Units: sizes, strides and lengths in elements or rows, *_bytes and *_memory in bytes, *_seconds in seconds.
 * Shapes: b batch, h query heads, hk kv heads (h % hk == 0), sq / sk query / key length, d head dim of q and k, dv of v and o.
 * Ownership: the library keeps no pointer after a call. Every tensor and struct is the caller's; what a function allocates
 *   says so and goes back through narrows_free.
 * Threads: every function may run in several threads at once; narrows_last_error speaks of its own thread.
 * Growth: a struct starts with its size, and zero in any other field is that field's default ("off", "not given"). Later
 *   releases only append fields. A library newer than the caller's header takes the fields that the caller lacks as zero;
 *   an older one accepts fields that it does not know as long as they are zero, and refuses the call otherwise.
 */
#ifndef NARROWS_NARROWS_H
#define NARROWS_NARROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef NARROWS_API
#define NARROWS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns. Anything but narrows_ok has its text in narrows_last_error, and the call has written nothing,
 * unless it is narrows_out_of_memory or narrows_internal. */
typedef int32_t narrows_status;
enum {
  narrows_ok = 0,
  narrows_invalid_value =
      1, /* a size, stride, option or content that breaks a rule, a null pointer, a wrong struct_size */
  narrows_invalid_type = 2,    /* a dtype or device that the argument cannot have */
  narrows_not_implemented = 3, /* within the contract, but no family of this build computes it; the text says why */
  narrows_out_of_memory = 4,
  narrows_invalid_file = 5,
  narrows_internal = 6
};

/* 0 is no dtype: a forgotten one is refused. */
typedef int32_t narrows_dtype;
enum {
  narrows_fp16 = 1,
  narrows_bf16 = 2,
  narrows_fp32 = 3,
  narrows_fp64 = 4,
  narrows_int32 = 5,
  narrows_int64 = 6,
  narrows_uint8 = 7,
  narrows_boolean = 8 /* one byte, 0 or 1 */
};

typedef int32_t narrows_device_kind;
enum { narrows_cpu = 0, narrows_cuda = 1 };

typedef int32_t narrows_causal;
enum { narrows_causal_none = 0, narrows_causal_bottom_right = 1, narrows_causal_top_left = 2 };

enum { narrows_max_rank = 5 };

/* A view of memory that the caller owns; rank 0 (all zero) = not given. An input is never written, except k and v of a
 * cache call that appends. This struct lies in others by value and never grows. */
typedef struct narrows_tensor {
  void* data; /* may be NULL when a size is 0, and for q, k, v where only a cost or a size is asked for */
  narrows_dtype dtype;
  int32_t rank;                      /* 0 to narrows_max_rank */
  int64_t shape[narrows_max_rank];   /* outermost first; entries beyond rank are not read */
  int64_t strides[narrows_max_rank]; /* in elements; with has_strides */
  int32_t has_strides;               /* 0: row-major without gaps, strides all 0. 1: as in strides */
  narrows_device_kind device_kind;
  int32_t device_index;
  int32_t reserved; /* 0 */
} narrows_tensor;

typedef struct narrows_inputs {
  size_t struct_size;
  narrows_tensor q; /* (b, sq, h, d), varlen (total_q, h, d) */
  narrows_tensor k; /* (b, sk, hk, d), varlen (total_k, hk, d), or a cache */
  narrows_tensor v; /* (b, sk, hk, dv), varlen (total_k, hk, dv), or a cache */
} narrows_inputs;

typedef struct narrows_outputs {
  size_t struct_size;
  narrows_tensor o;   /* (b, sq, h, dv), varlen (total_q, h, dv); q's dtype */
  narrows_tensor lse; /* optional: natural log-sum-exp, (b, h, sq), varlen (h, total_q); fp32 (fp64 for fp64) */
} narrows_outputs;

typedef struct narrows_backward_inputs {
  size_t struct_size;
  narrows_tensor q;
  narrows_tensor k;
  narrows_tensor v;
  narrows_tensor o; /* o and lse as narrows_forward wrote them */
  narrows_tensor lse;
  narrows_tensor dout; /* gradient of o: shape and dtype of o */
  narrows_tensor dlse; /* optional: gradient of lse */
} narrows_backward_inputs;

/* Each optional; written, not added to. Shape and dtype of what each is the gradient of. */
typedef struct narrows_gradients {
  size_t struct_size;
  narrows_tensor dq;
  narrows_tensor dk;
  narrows_tensor dv;
  narrows_tensor dbias;
  narrows_tensor dslopes;
  narrows_tensor dsinks;
} narrows_gradients;

/* Gradients of narrows_merge. */
typedef struct narrows_merge_gradients {
  size_t struct_size;
  const narrows_outputs* parts; /* as many as narrows_merge had; in each, o or lse may be left out. NULL = none */
  narrows_tensor dsinks;        /* optional: shape and dtype of sinks */
} narrows_merge_gradients;

/* Everything that is not q, k, v or a result. All rules intersect. Flags are 0 or 1. */
typedef struct narrows_options {
  size_t struct_size;

  /* Scores: scale * Q K^T -> softcap -> + ALiBi + bias -> mask -> softmax over keys and sink -> dropout -> P V. */
  double scale; /* with has_scale: any finite value; without: 1 / sqrt(d), and this is 0 */
  int32_t has_scale;
  int32_t reserved;            /* 0 */
  double softcap;              /* cap * tanh(s / cap); 0 = off */
  narrows_tensor alibi_slopes; /* (h) or (b, h), floats; adds -slope * |p - j| */
  narrows_tensor bias;         /* floats, broadcasts to (b, h, sq, sk); -inf masks */
  narrows_tensor sinks;        /* (h), floats: one more logit per head that has no value row; -inf = none */

  /* Which keys a query sees. Query i stands at position p = i + shift on the keys' axis. */
  narrows_causal causal; /* j <= p; bottom_right: shift = sk - sq, top_left: shift = 0 */
  int32_t has_window;
  int64_t window_left; /* with has_window: keys [p - left, p + right], both included, -1 = unlimited; without: 0 */
  int64_t window_right;
  int64_t chunk;        /* floor(j / chunk) == floor(p / chunk); 0 = off */
  narrows_tensor shift; /* (b) int32: the shift of each sequence; default sk - sq */
  narrows_tensor mask;  /* boolean, broadcasts to (b, h, sq, sk); true = may attend */

  /* Dropout on P, the same mask on every backend. */
  double dropout; /* probability of dropping, [0, 1) */
  uint64_t seed;
  uint64_t offset;
  narrows_tensor seed_tensor; /* (1) int64 in place of seed, which is then 0: read when the call runs */
  narrows_tensor offset_tensor;
  int64_t origin_b; /* first batch row, head, query and key of this call in a larger one */
  int64_t origin_h;
  int64_t origin_i;
  int64_t origin_j;
  int64_t origin_H; /* query heads of the whole model; 0 = this call's h */

  /* Lengths. Varlen: q (total_q, h, d) and k, v (total_k, hk, *) hold sequences end to end. A GPU call's int32 tensors lie on
   * its device and are read there alone: see narrows.hpp. */
  narrows_tensor cu_seqlens_q; /* (b + 1) int32: sequence s is rows [cu[s], cu[s + 1]) */
  narrows_tensor cu_seqlens_k;
  narrows_tensor seqused_q; /* (b) int32: rows used of each sequence */
  narrows_tensor seqused_k;

  /* KV cache: k, v are the cache, (b_cache, capacity, hk, *) or with block_table pages (pages, page size, hk, *). */
  narrows_tensor cache_seqlens;   /* (b) int32: slots filled, leftpad included, before append */
  narrows_tensor block_table;     /* (b, pages per sequence) int32 */
  narrows_tensor cache_batch_idx; /* (b) int32: cache row of each sequence */
  narrows_tensor leftpad;         /* (b) int32: slots skipped at the front */
  narrows_tensor k_new;           /* (b, s_new, hk, *) or varlen (total_new, hk, *): appended before attention */
  narrows_tensor v_new;
  narrows_tensor cu_seqlens_k_new; /* (b + 1) int32 */
  narrows_tensor rotary_cos;       /* (positions, rotated / 2) */
  narrows_tensor rotary_sin;
  narrows_tensor rotary_base; /* (b) int32: position of query 0; default cache_seqlens */
  int32_t rotary_interleaved; /* 1: pairs (2i, 2i + 1); 0: (i, i + rotated / 2) */

  /* How to compute. None changes the result beyond rounding. */
  int32_t deterministic;
  int32_t batch_invariant;
  int32_t num_splits;       /* of the keys; 0 = the plan decides */
  int32_t check;            /* or NARROWS_CHECK=1: synchronise and fail with what `status` would say */
  int32_t threads;          /* CPU; 0 = NARROWS_THREADS, else every core */
  narrows_tensor workspace; /* uint8: scratch that the caller owns */
  narrows_tensor status;    /* int32 (4) on the device: code (0 = every rule kept), sequence, value, limit */
  const char* family;       /* force a family by name; NULL or "": NARROWS_FAMILY, else the fastest that accepts */
  void* stream; /* GPU: a CUstream (cudaStream_t) of the tensors' device; NULL = the legacy default stream */

  /* Which keys a query sees, besides the rules above. (b, sq), varlen (total_q), int32: query i of its sequence sees keys
   * key_begin[i] <= j < key_end[i] alone, j counted from the sequence's first key. Any value, and either alone. */
  narrows_tensor key_begin;
  narrows_tensor key_end;
} narrows_options;

/* What a call costs, counted exactly. The strings end in a zero byte and all lie in `memory`. */
typedef struct narrows_explanation {
  size_t struct_size;
  void* memory;           /* the strings: narrows_free(explanation.memory) ends them all */
  const char* problem;    /* the facts in one line */
  const char* family;     /* that would run it */
  const char* plan;       /* its decisions, a line each */
  const char* refused;    /* "family: reason", a line each; "" = none */
  const char* limited_by; /* "compute" or "memory" */
  const char* text;       /* everything, for people */
  int64_t visible_pairs;  /* (query, key, head) triples that are computed by definition */
  double flops;
  int64_t fused_bytes;        /* compulsory traffic: each of q, k, v, o once */
  int64_t three_kernel_bytes; /* the same and S and P, written and read */
  int64_t fused_memory;       /* bytes beside inputs and outputs */
  int64_t three_kernel_memory;
  double fused_intensity; /* FLOP per byte */
  double three_kernel_intensity;
  double predicted_seconds;
  double three_kernel_seconds;
  int64_t
      fused_l2_bytes; /* forward on a GPU, between L2 and multiprocessors: k, v once a block of query rows; else 0 */
} narrows_explanation;

/* Structs with every field at its default; start from these. */
static inline narrows_inputs narrows_inputs_default(void) {
  narrows_inputs in;
  memset(&in, 0, sizeof in);
  in.struct_size = sizeof in;
  return in;
}
static inline narrows_outputs narrows_outputs_default(void) {
  narrows_outputs out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}
static inline narrows_backward_inputs narrows_backward_inputs_default(void) {
  narrows_backward_inputs in;
  memset(&in, 0, sizeof in);
  in.struct_size = sizeof in;
  return in;
}
static inline narrows_gradients narrows_gradients_default(void) {
  narrows_gradients out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}
static inline narrows_merge_gradients narrows_merge_gradients_default(void) {
  narrows_merge_gradients out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}
static inline narrows_options narrows_options_default(void) {
  narrows_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  return options;
}
static inline narrows_explanation narrows_explanation_default(void) {
  narrows_explanation explanation;
  memset(&explanation, 0, sizeof explanation);
  explanation.struct_size = sizeof explanation;
  return explanation;
}

/* A row-major CPU tensor without gaps. A rank outside 0..narrows_max_rank is kept, for the call to refuse. */
static inline narrows_tensor narrows_view(void* data, narrows_dtype dtype, int32_t rank, const int64_t* shape) {
  narrows_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  for (int32_t axis = 0; axis < rank && axis < narrows_max_rank; ++axis) tensor.shape[axis] = shape[axis];
  return tensor;
}

/* O = attention(q, k, v) and, if given, the LSE. Everything is checked before anything is written. A row that sees no key
 * gets O = 0 and LSE = -inf (the sink with a sink). options may be NULL: all defaults. */
NARROWS_API narrows_status narrows_forward(const narrows_inputs* in, const narrows_outputs* out,
                                           const narrows_options* options);

/* Does now what the first narrows_forward of this kind would do: on a GPU compiles and loads its kernel, so that it may be
 * called while a stream is captured. On the CPU there is nothing to do beyond checking. Data may be NULL but for a CPU's int32
 * tensors. */
NARROWS_API narrows_status narrows_prepare(const narrows_inputs* in, const narrows_options* options);

/* The gradients that `out` asks for, from what narrows_forward read and wrote: P is computed again from q, k and the LSE,
 * never stored. options are forward's, seed and offset included. Rows that saw no key get dq = 0 and add nothing to the
 * others. Memory is linear in the sequence; on the CPU bits do not depend on the number of threads, on a GPU those of dq may
 * differ from call to call unless options.deterministic. */
NARROWS_API narrows_status narrows_backward(const narrows_backward_inputs* in, const narrows_gradients* out,
                                            const narrows_options* options);

/* As narrows_prepare, of the first narrows_backward of this kind, whichever gradients it asks for. o, dout and gradients count
 * as laid out without gaps. */
NARROWS_API narrows_status narrows_prepare_backward(const narrows_inputs* in, const narrows_options* options);

/* One row's attention over several sets of keys, from the (o, lse) that narrows_forward gave for each set: splits, shared
 * prefixes, ranks. parts: an array of `count` structs of one size. All parts have the shapes, dtypes and device of `out`,
 * whose lse is optional. A part that saw no key has lse = -inf and is left out, whatever its o; all empty gives (0, -inf).
 * sinks: (h), counted once here and by no part; NULL = none. stream: a CUstream of a GPU's tensors, which is not waited for;
 * NULL on the CPU. At most 32 parts on a GPU. */
NARROWS_API narrows_status narrows_merge(const narrows_outputs* parts, size_t count, const narrows_outputs* out,
                                         const narrows_tensor* sinks, void* stream);

/* Gradients of each part's o and lse, and of the sinks. dout, dlse (NULL = none): gradients of narrows_merge's results. The rest
 * is as narrows_merge's; on a GPU 12 bytes of each row are allocated on the stream meanwhile. */
NARROWS_API narrows_status narrows_merge_backward(const narrows_outputs* parts, size_t count,
                                                  const narrows_tensor* dout, const narrows_tensor* dlse,
                                                  const narrows_merge_gradients* out, const narrows_tensor* sinks,
                                                  void* stream);

/* *bytes = the scratch that the call needs. Given that many in options.workspace it allocates nothing. Only shapes, lengths
 * and options matter: data may be NULL but for a CPU's int32 tensors. */
NARROWS_API narrows_status narrows_workspace_size(const narrows_inputs* in, const narrows_options* options,
                                                  int64_t* bytes);
NARROWS_API narrows_status narrows_backward_workspace_size(const narrows_inputs* in, const narrows_options* options,
                                                           int64_t* bytes);

/* Fills in *explanation, which starts as narrows_explanation_default() and is unchanged on failure; the caller ends its
 * strings with narrows_free(explanation->memory), before using it again. No element of q, k, v is read. options may be
 * NULL: all defaults. */
NARROWS_API narrows_status narrows_explain(const narrows_inputs* in, const narrows_options* options,
                                           narrows_explanation* explanation);

/* *text = the library and this machine, a "name: value" a line: version, cpu, instruction_set, threads, then each family
 * in the order of preference with "available" or "not available" and the detail. The caller ends it with narrows_free. */
NARROWS_API narrows_status narrows_info(char** text);

/* What narrows_explain and narrows_info allocated. NULL is fine. */
NARROWS_API void narrows_free(void* memory);

/* Why this thread's last call that returned a narrows_status failed; "" if it did not. Never NULL. Valid until that
 * thread's next such call. */
NARROWS_API const char* narrows_last_error(void);

NARROWS_API const char* narrows_version(void);             /* "major.minor.patch"; static */
NARROWS_API const char* narrows_name(narrows_dtype dtype); /* "fp16"; static; NULL if it is no dtype */
NARROWS_API size_t narrows_item_size(narrows_dtype dtype); /* bytes; 0 if it is no dtype */

#ifdef __cplusplus
}
#endif

#endif
