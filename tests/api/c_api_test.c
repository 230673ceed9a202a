/* narrows.h as a C program sees it: compiled as C11 and linked with the installed library. */
#include <pthread.h>

#include "tests/api/c_support.h"

static narrows_status forward(const small_call* call) { return narrows_forward(&call->in, &call->out, &call->options); }

static int untouched(const small_call* call) {
  return isnan(call->o[0][0]) && isnan(call->o[0][1]) && isnan(call->o[1][0]) && isnan(call->o[1][1]);
}

static void test_values(void) {
  small_call call;
  fill(&call);
  call.out.lse = narrows_view(call.lse, narrows_fp32, 3, kLseShape);
  EXPECT(forward(&call) == narrows_ok);
  EXPECT(strcmp(narrows_last_error(), "") == 0);
  EXPECT_NEAR(call.o[0][0], 3);
  EXPECT_NEAR(call.o[0][1], 7);
  EXPECT_NEAR(call.o[1][0], 2);
  EXPECT_NEAR(call.o[1][1], 6);
  EXPECT_NEAR(call.lse[0], log(4));
  EXPECT_NEAR(call.lse[1], log(2));
}

static void test_default_options(void) {
  small_call call;
  fill(&call);
  call.k[0][0] *= (float)sqrt(2); /* undoes the default scale, 1 / sqrt(2) */
  EXPECT(narrows_forward(&call.in, &call.out, NULL) == narrows_ok);
  EXPECT_NEAR(call.o[0][0], 3);
  EXPECT_NEAR(call.o[1][1], 6);
}

static void test_causal_and_window(void) {
  small_call call;
  fill(&call);
  call.out.lse = narrows_view(call.lse, narrows_fp32, 3, kLseShape);
  call.options.causal = narrows_causal_bottom_right; /* the first query sees the first key alone */
  EXPECT(forward(&call) == narrows_ok);
  EXPECT_NEAR(call.o[0][0], 4);
  EXPECT_NEAR(call.o[0][1], 8);
  EXPECT_NEAR(call.lse[0], log(3));
  EXPECT_NEAR(call.o[1][0], 2);
  fill(&call);
  call.options.has_window = 1; /* the second query sees the second key alone */
  call.options.window_left = 0;
  call.options.window_right = -1;
  EXPECT(forward(&call) == narrows_ok);
  EXPECT_NEAR(call.o[0][0], 3);
  EXPECT_NEAR(call.o[1][0], 0);
  EXPECT_NEAR(call.o[1][1], 4);
}

static void test_strided_output(void) {
  small_call call;
  fill(&call);
  float wide[2][4] = {{NAN, -1, NAN, -1}, {NAN, -1, NAN, -1}};
  call.out.o.data = wide;
  call.out.o.has_strides = 1;
  call.out.o.strides[0] = 8;
  call.out.o.strides[1] = 4;
  call.out.o.strides[2] = 4;
  call.out.o.strides[3] = 2;
  EXPECT(forward(&call) == narrows_ok);
  EXPECT_NEAR(wide[0][0], 3);
  EXPECT_NEAR(wide[0][2], 7);
  EXPECT_NEAR(wide[1][0], 2);
  EXPECT_NEAR(wide[1][2], 6);
  EXPECT(wide[0][1] == -1 && wide[0][3] == -1 && wide[1][1] == -1 && wide[1][3] == -1);
}

static void test_null_pointers(void) {
  small_call call;
  fill(&call);
  EXPECT_REFUSED(narrows_forward(NULL, &call.out, &call.options), narrows_invalid_value,
                 "in: NULL: this argument is required");
  EXPECT_REFUSED(narrows_forward(&call.in, NULL, &call.options), narrows_invalid_value,
                 "out: NULL: this argument is required");
  EXPECT_REFUSED(narrows_explain(&call.in, NULL, NULL), narrows_invalid_value,
                 "explanation: NULL: this argument is required");
  narrows_explanation explanation = narrows_explanation_default();
  EXPECT_REFUSED(narrows_explain(NULL, NULL, &explanation), narrows_invalid_value,
                 "in: NULL: this argument is required");
  EXPECT(explanation.memory == NULL);
  EXPECT_REFUSED(narrows_info(NULL), narrows_invalid_value, "text: NULL: this argument is required");
  call.in.q = narrows_view(NULL, 0, 0, NULL);
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "q: not given: this argument is required");
  EXPECT(untouched(&call));
  narrows_free(NULL);
}

/* What C can say and the C++ types cannot: one field changed, one text expected, nothing written. */
static void test_tensor_fields(void) {
  small_call call;
  fill(&call);
  call.in.q.dtype = 99;
  EXPECT_REFUSED(forward(&call), narrows_invalid_type,
                 "q.dtype: 99: must be a narrows_dtype, narrows_fp16 (1) to narrows_boolean (8)");
  fill(&call);
  call.in.k.dtype = 0;
  EXPECT_REFUSED(forward(&call), narrows_invalid_type,
                 "k.dtype: 0: must be a narrows_dtype, narrows_fp16 (1) to narrows_boolean (8)");
  fill(&call);
  call.in.v.rank = 7;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "v.rank: 7: must be in [0, 5]; nearest legal: 5");
  fill(&call);
  call.out.o.rank = -1;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "o.rank: -1: must be in [0, 5]; nearest legal: 0");
  fill(&call);
  call.out.lse.data = call.lse;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "lse.rank: 0: data is given, so the rank must be in [1, 5]; nearest legal: 1");
  fill(&call);
  call.in.q.has_strides = 2;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "q.has_strides: 2: a flag must be 0 or 1; nearest legal: 1");
  fill(&call);
  call.in.q.strides[1] = 4;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "q.strides[1]: 4: is set without q.has_strides; nearest legal: q.has_strides = 1");
  fill(&call);
  call.in.q.device_kind = 2;
  EXPECT_REFUSED(forward(&call), narrows_invalid_type, "q.device_kind: 2: must be narrows_cpu (0) or narrows_cuda (1)");
  fill(&call);
  call.options.mask.reserved = 5;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "mask.reserved: 5: must be 0; nearest legal: 0");
  EXPECT(untouched(&call));
}

static void test_option_fields(void) {
  small_call call;
  fill(&call);
  call.options.has_scale = -1;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "has_scale: -1: a flag must be 0 or 1; nearest legal: 0");
  fill(&call);
  call.options.has_scale = 0;
  call.options.scale = 0.5;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "scale: 0.5: is set without has_scale; nearest legal: has_scale = 1");
  fill(&call);
  call.options.window_left = 128;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "window_left: 128: is set without has_window; nearest legal: has_window = 1");
  fill(&call);
  call.options.window_right = -1;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "window_right: -1: is set without has_window; nearest legal: has_window = 1");
  fill(&call);
  call.options.causal = 3;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "causal: 3: must be narrows_causal_none (0), narrows_causal_bottom_right (1) or "
                 "narrows_causal_top_left (2)");
  fill(&call);
  call.options.deterministic = 2;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "deterministic: 2: a flag must be 0 or 1; nearest legal: 1");
  fill(&call);
  call.options.reserved = 1;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, "options.reserved: 1: must be 0; nearest legal: 0");
  fill(&call);
  int64_t seed = 3;
  const int64_t one = 1;
  call.options.seed = 4;
  call.options.seed_tensor = narrows_view(&seed, narrows_int64, 1, &one);
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "seed: 4: must be 0 when seed_tensor is given; nearest legal: 0");
  EXPECT(untouched(&call));
}

static void test_struct_sizes(void) {
  small_call call;
  fill(&call);
  call.in.struct_size = 0;
  EXPECT_REFUSED(forward(&call), narrows_invalid_value,
                 "in.struct_size: 0: must be the sizeof of the struct in the caller's header; nearest legal: 344");
  fill(&call);
  call.out.struct_size = 100000;
  EXPECT_REFUSED(
      forward(&call), narrows_invalid_value,
      "out.struct_size: 100000: must be the sizeof of the struct in the caller's header; nearest legal: 232");
  fill(&call);
  call.options.struct_size = sizeof(void*);
  EXPECT_REFUSED(
      forward(&call), narrows_invalid_value,
      "options.struct_size: 8: must be the sizeof of the struct in the caller's header; nearest legal: 2968");
  narrows_explanation explanation = narrows_explanation_default();
  explanation.struct_size = 136;
  fill(&call);
  EXPECT_REFUSED(
      narrows_explain(&call.in, NULL, &explanation), narrows_invalid_value,
      "explanation.struct_size: 136: must be the sizeof of the struct in the caller's header; nearest legal: "
      "152");
  EXPECT(untouched(&call));
  explanation.struct_size = 144; /* release 0.1 ended before fused_l2_bytes */
  explanation.fused_l2_bytes = 7;
  EXPECT(narrows_explain(&call.in, NULL, &explanation) == narrows_ok);
  EXPECT(explanation.struct_size == 144 && explanation.fused_l2_bytes == 7 && explanation.visible_pairs > 0);
  narrows_free(explanation.memory);
}

/* A program built with a later header, whose options have one more field. */
static void test_newer_caller(void) {
  struct newer_options {
    narrows_options known;
    int64_t added;
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.known.struct_size = sizeof newer;
  newer.known.has_scale = 1;
  newer.known.scale = 1;
  small_call call;
  fill(&call);
  newer.added = 1;
  char text[200];
  snprintf(text, sizeof text,
           "options.struct_size: 2976: a field beyond the 2968 bytes that this library (%s) knows is set; "
           "nearest legal: 2968",
           narrows_version());
  EXPECT_REFUSED(narrows_forward(&call.in, &call.out, &newer.known), narrows_invalid_value, text);
  EXPECT(untouched(&call));
  newer.added = 0;
  EXPECT(narrows_forward(&call.in, &call.out, &newer.known) == narrows_ok);
  EXPECT_NEAR(call.o[0][0], 3);
}

static void test_explain(void) {
  small_call call;
  fill(&call);
  call.in.q.data = call.in.k.data = call.in.v.data = NULL;
  narrows_explanation explanation = narrows_explanation_default();
  EXPECT(narrows_explain(&call.in, &call.options, &explanation) == narrows_ok);
  EXPECT(explanation.struct_size == sizeof explanation);
  EXPECT(explanation.visible_pairs == 4);
  EXPECT(explanation.flops == 4 * 2 * (2 + 2)); /* 2 (d + dv) a pair */
  EXPECT(strcmp(explanation.family, "cpu") == 0);
  EXPECT(strlen(explanation.problem) > 0 && strlen(explanation.plan) > 0 && strlen(explanation.text) > 0);
  EXPECT(strcmp(explanation.limited_by, "compute") == 0 || strcmp(explanation.limited_by, "memory") == 0);
  EXPECT(explanation.refused != NULL);
  narrows_free(explanation.memory);
}

static void test_prepare_and_stream(void) {
  small_call call;
  fill(&call);
  EXPECT(narrows_prepare(&call.in, &call.options) == narrows_ok);
  EXPECT(narrows_prepare(&call.in, NULL) == narrows_ok);
  EXPECT_REFUSED(narrows_prepare(NULL, NULL), narrows_invalid_value, "in: NULL: this argument is required");
  EXPECT(narrows_prepare_backward(&call.in, &call.options) == narrows_ok);
  EXPECT_REFUSED(narrows_prepare_backward(NULL, NULL), narrows_invalid_value, "in: NULL: this argument is required");
  call.options.stream = &call;
  const char* text = "stream: given: a call on the CPU has none; nearest legal: null";
  EXPECT_REFUSED(narrows_prepare(&call.in, &call.options), narrows_invalid_value, text);
  EXPECT_REFUSED(narrows_prepare_backward(&call.in, &call.options), narrows_invalid_value, text);
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, text);
}

static void test_info_and_names(void) {
  char* text = NULL;
  EXPECT(narrows_info(&text) == narrows_ok);
  char version_line[64];
  snprintf(version_line, sizeof version_line, "version: %s\ncpu: ", narrows_version());
  EXPECT(text && strncmp(text, version_line, strlen(version_line)) == 0);
  EXPECT(text && strstr(text, "\ninstruction_set: ") && strstr(text, "\nthreads: ") &&
         strstr(text, "\ncpu: available, "));
  narrows_free(text);
  EXPECT(strcmp(narrows_name(narrows_fp16), "fp16") == 0);
  EXPECT(strcmp(narrows_name(narrows_boolean), "boolean") == 0);
  EXPECT(narrows_name(0) == NULL && narrows_name(9) == NULL && narrows_name(-1) == NULL);
  EXPECT(narrows_item_size(narrows_bf16) == 2 && narrows_item_size(narrows_fp64) == 8);
  EXPECT(narrows_item_size(narrows_boolean) == 1);
  EXPECT(narrows_item_size(0) == 0 && narrows_item_size(9) == 0 && narrows_item_size(INT32_MIN) == 0);
}

/* In another thread: starts without an error, and what happens there stays there. */
static void* other_thread(void* unused) {
  (void)unused;
  EXPECT(strcmp(narrows_last_error(), "") == 0);
  EXPECT_REFUSED(narrows_info(NULL), narrows_invalid_value, "text: NULL: this argument is required");
  small_call call;
  fill(&call);
  EXPECT(forward(&call) == narrows_ok);
  EXPECT(strcmp(narrows_last_error(), "") == 0);
  return NULL;
}

static void test_last_error_is_of_its_thread(void) {
  small_call call;
  fill(&call);
  call.in.v.rank = 7;
  const char* text = "v.rank: 7: must be in [0, 5]; nearest legal: 5";
  EXPECT_REFUSED(forward(&call), narrows_invalid_value, text);
  const char* kept = narrows_last_error();
  pthread_t thread;
  EXPECT(pthread_create(&thread, NULL, other_thread, NULL) == 0);
  EXPECT(pthread_join(thread, NULL) == 0);
  EXPECT(strcmp(kept, text) == 0);
  EXPECT(narrows_name(narrows_fp16) && narrows_last_error() == kept && strcmp(kept, text) == 0);
  fill(&call);
  EXPECT(forward(&call) == narrows_ok);
  EXPECT(strcmp(narrows_last_error(), "") == 0);
}

int main(void) {
  test_values();
  test_default_options();
  test_causal_and_window();
  test_strided_output();
  test_null_pointers();
  test_tensor_fields();
  test_option_fields();
  test_struct_sizes();
  test_newer_caller();
  test_explain();
  test_prepare_and_stream();
  test_info_and_names();
  test_last_error_is_of_its_thread();
  return report();
}
