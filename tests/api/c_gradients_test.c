/* Gradients, merges and scratch sizes from C, against numbers by hand. */
#include "tests/api/c_support.h"

/* The small call with dO the identity. O = ((3, 7), (2, 6)), so D = (3, 6); dP = dO V^T = ((4, 0), (8, 4)). */
typedef struct backward_call {
  small_call forward;
  float dout[2][2], dlse[2], dq[2][2], dk[2][2], dv[2][2];
  float bias[2][2], dbias[2][2], number, gradient;
  narrows_backward_inputs in;
  narrows_gradients out;
} backward_call;

static const int64_t kBiasShape[] = {2, 2};
static const int64_t kOne[] = {1};
static const double kLn3 = 1.0986122886681098;

/* Runs forward, too, with the options that `set` may have changed. */
static void fill_backward(backward_call* call, void (*set)(backward_call*)) {
  small_call* forward = &call->forward;
  fill(forward);
  if (set) set(call);
  forward->out.lse = narrows_view(forward->lse, narrows_fp32, 3, kLseShape);
  EXPECT(narrows_forward(&forward->in, &forward->out, &forward->options) == narrows_ok);
  const float dout[2][2] = {{1, 0}, {0, 1}};
  memcpy(call->dout, dout, sizeof dout);
  for (int i = 0; i < 2; ++i)
    for (int c = 0; c < 2; ++c) call->dq[i][c] = call->dk[i][c] = call->dv[i][c] = call->dbias[i][c] = NAN;
  call->gradient = NAN;
  call->in = narrows_backward_inputs_default();
  call->in.q = forward->in.q;
  call->in.k = forward->in.k;
  call->in.v = forward->in.v;
  call->in.o = forward->out.o;
  call->in.lse = forward->out.lse;
  call->in.dout = narrows_view(call->dout, narrows_fp32, 4, kShape);
  call->out = narrows_gradients_default();
  call->out.dq = narrows_view(call->dq, narrows_fp32, 4, kShape);
  call->out.dk = narrows_view(call->dk, narrows_fp32, 4, kShape);
  call->out.dv = narrows_view(call->dv, narrows_fp32, 4, kShape);
}

static narrows_status backward(const backward_call* call) {
  return narrows_backward(&call->in, &call->out, &call->forward.options);
}

static int untouched(const backward_call* call) {
  for (int i = 0; i < 2; ++i)
    for (int c = 0; c < 2; ++c)
      if (!isnan(call->dq[i][c]) || !isnan(call->dk[i][c]) || !isnan(call->dv[i][c])) return 0;
  return 1;
}

/* dS = P (dP - D) = ((3/4, -3/4), (1, -1)). */
static void test_values(void) {
  backward_call call;
  fill_backward(&call, NULL);
  EXPECT(backward(&call) == narrows_ok);
  EXPECT(strcmp(narrows_last_error(), "") == 0);
  EXPECT_NEAR(call.dq[0][0], 0.75 * kLn3);
  EXPECT_NEAR(call.dq[0][1], 0);
  EXPECT_NEAR(call.dq[1][0], kLn3);
  EXPECT_NEAR(call.dq[1][1], 0);
  EXPECT_NEAR(call.dk[0][0], 0.75);
  EXPECT_NEAR(call.dk[0][1], 1);
  EXPECT_NEAR(call.dk[1][0], -0.75);
  EXPECT_NEAR(call.dk[1][1], -1);
  EXPECT_NEAR(call.dv[0][0], 0.75);
  EXPECT_NEAR(call.dv[0][1], 0.5);
  EXPECT_NEAR(call.dv[1][0], 0.25);
  EXPECT_NEAR(call.dv[1][1], 0.5);
}

/* With dLSE = (1, 2) dS = ((3/2, -1/2), (2, 0)); what is not asked for stays as it is. */
static void test_gradient_of_the_lse(void) {
  backward_call call;
  fill_backward(&call, NULL);
  call.dlse[0] = 1;
  call.dlse[1] = 2;
  call.in.dlse = narrows_view(call.dlse, narrows_fp32, 3, kLseShape);
  memset(&call.out.dv, 0, sizeof call.out.dv);
  EXPECT(backward(&call) == narrows_ok);
  EXPECT_NEAR(call.dq[0][0], 1.5 * kLn3);
  EXPECT_NEAR(call.dq[1][0], 2 * kLn3);
  EXPECT_NEAR(call.dk[0][0], 1.5);
  EXPECT_NEAR(call.dk[0][1], 2);
  EXPECT_NEAR(call.dk[1][0], -0.5);
  EXPECT_NEAR(call.dk[1][1], 0);
  EXPECT(isnan(call.dv[0][0]) && isnan(call.dv[1][1]));
}

static void zero_bias(backward_call* call) {
  memset(call->bias, 0, sizeof call->bias);
  call->forward.options.bias = narrows_view(call->bias, narrows_fp32, 2, kBiasShape);
}

static void zero_slope(backward_call* call) {
  call->number = 0;
  call->forward.options.alibi_slopes = narrows_view(&call->number, narrows_fp32, 1, kOne);
}

/* Rows sum to 6 and 4: O = ((2, 14/3), (1, 3)), D = (2, 3), and the sink weighs 1/3 and 1/2. */
static void sink_of_two(backward_call* call) {
  call->number = (float)log(2);
  call->forward.options.sinks = narrows_view(&call->number, narrows_fp32, 1, kOne);
}

static void test_bias_slopes_and_sinks(void) {
  backward_call call;
  fill_backward(&call, zero_bias);
  call.out.dbias = narrows_view(call.dbias, narrows_fp32, 2, kBiasShape);
  EXPECT(backward(&call) == narrows_ok);
  EXPECT_NEAR(call.dbias[0][0], 0.75);
  EXPECT_NEAR(call.dbias[0][1], -0.75);
  EXPECT_NEAR(call.dbias[1][0], 1);
  EXPECT_NEAR(call.dbias[1][1], -1);
  fill_backward(&call, zero_slope);
  call.out.dslopes = narrows_view(&call.gradient, narrows_fp32, 1, kOne);
  EXPECT(backward(&call) == narrows_ok);
  EXPECT_NEAR(call.gradient, -(-0.75 + 1)); /* -sum |p - j| dS */
  fill_backward(&call, sink_of_two);
  call.out.dsinks = narrows_view(&call.gradient, narrows_fp32, 1, kOne);
  EXPECT(backward(&call) == narrows_ok);
  EXPECT_NEAR(call.gradient, -(2.0 / 3 + 3.0 / 2)); /* sum exp(sink - LSE)(-D) */
  EXPECT_NEAR(call.dv[0][0], 3.0 / 6);
}

static void test_refusals(void) {
  backward_call call;
  fill_backward(&call, NULL);
  EXPECT_REFUSED(narrows_backward(NULL, &call.out, NULL), narrows_invalid_value, "in: NULL: this argument is required");
  EXPECT_REFUSED(narrows_backward(&call.in, NULL, NULL), narrows_invalid_value, "out: NULL: this argument is required");
  call.in.struct_size = 344;
  EXPECT_REFUSED(backward(&call), narrows_invalid_value,
                 "in.struct_size: 344: must be the sizeof of the struct in the caller's header; nearest legal: 792");
  fill_backward(&call, NULL);
  call.out.struct_size = 232;
  EXPECT_REFUSED(backward(&call), narrows_invalid_value,
                 "out.struct_size: 232: must be the sizeof of the struct in the caller's header; nearest legal: 680");
  fill_backward(&call, NULL);
  memset(&call.in.lse, 0, sizeof call.in.lse);
  EXPECT_REFUSED(backward(&call), narrows_invalid_value, "lse: not given: this argument is required");
  fill_backward(&call, NULL);
  call.in.dout.rank = 9;
  EXPECT_REFUSED(backward(&call), narrows_invalid_value, "dout.rank: 9: must be in [0, 5]; nearest legal: 5");
  fill_backward(&call, NULL);
  call.out.dq.dtype = 0;
  EXPECT_REFUSED(backward(&call), narrows_invalid_type,
                 "dq.dtype: 0: must be a narrows_dtype, narrows_fp16 (1) to narrows_boolean (8)");
  fill_backward(&call, NULL);
  call.out.dbias = narrows_view(call.dbias, narrows_fp32, 2, kBiasShape);
  EXPECT_REFUSED(backward(&call), narrows_invalid_value, "dbias: given: needs bias");
  fill_backward(&call, NULL);
  int32_t filled = 2;
  call.forward.options.cache_seqlens = narrows_view(&filled, narrows_int32, 1, kOne);
  EXPECT_REFUSED(backward(&call), narrows_invalid_value, "backward: a cache call: cache calls are forward only");
  EXPECT(untouched(&call));
}

/* The size that a call asks for is enough, and one byte less is refused by name. */
static void test_workspace_sizes(void) {
  backward_call call;
  fill_backward(&call, NULL);
  int64_t bytes = -1, backward_bytes = -1;
  narrows_inputs shapes = call.forward.in;
  shapes.q.data = shapes.k.data = shapes.v.data = NULL;
  EXPECT(narrows_workspace_size(&shapes, &call.forward.options, &bytes) == narrows_ok);
  EXPECT(narrows_backward_workspace_size(&shapes, &call.forward.options, &backward_bytes) == narrows_ok);
  EXPECT(bytes > 0 && backward_bytes > 0);
  void* memory = malloc((size_t)backward_bytes);
  call.forward.options.workspace = narrows_view(memory, narrows_uint8, 1, &backward_bytes);
  EXPECT(backward(&call) == narrows_ok);
  EXPECT_NEAR(call.dq[1][0], kLn3);
  char text[160];
  snprintf(text, sizeof text, "workspace: %lld bytes: this call needs %lld; nearest legal: %lld",
           (long long)(backward_bytes - 1), (long long)backward_bytes, (long long)backward_bytes);
  call.forward.options.workspace.shape[0] -= 1;
  EXPECT_REFUSED(backward(&call), narrows_invalid_value, text);
  free(memory);
  EXPECT_REFUSED(narrows_workspace_size(&shapes, NULL, NULL), narrows_invalid_value,
                 "bytes: NULL: this argument is required");
  EXPECT_REFUSED(narrows_backward_workspace_size(NULL, NULL, &bytes), narrows_invalid_value,
                 "in: NULL: this argument is required");
  EXPECT_REFUSED(narrows_backward_workspace_size(&shapes, NULL, NULL), narrows_invalid_value,
                 "bytes: NULL: this argument is required");
}

/* One query, one head, value dim 1, two parts: o = (4, 0) with lse = (ln 3, 0), so that they weigh 3/4 and 1/4. */
typedef struct merge_call {
  float o[2], lse[2], merged, merged_lse, dout, dlse, sink, do_[2], dlse_[2], dsink;
  narrows_outputs parts[2], gradients[2], out;
  narrows_tensor dout_view, dlse_view, sinks;
  narrows_merge_gradients gradient_out;
} merge_call;

static const int64_t kRow[] = {1, 1, 1, 1};

static void fill_merge(merge_call* call) {
  memset(call, 0, sizeof *call);
  call->o[0] = 4;
  call->lse[0] = (float)kLn3;
  call->merged = call->merged_lse = call->dsink = NAN;
  call->dout = 1;
  call->dlse = 2;
  call->sink = (float)(2 * log(2));
  for (int part = 0; part < 2; ++part) {
    call->do_[part] = call->dlse_[part] = NAN;
    call->parts[part] = call->gradients[part] = narrows_outputs_default();
    call->parts[part].o = narrows_view(&call->o[part], narrows_fp32, 4, kRow);
    call->parts[part].lse = narrows_view(&call->lse[part], narrows_fp32, 3, kRow);
    call->gradients[part].o = narrows_view(&call->do_[part], narrows_fp32, 4, kRow);
    call->gradients[part].lse = narrows_view(&call->dlse_[part], narrows_fp32, 3, kRow);
  }
  call->out = narrows_outputs_default();
  call->out.o = narrows_view(&call->merged, narrows_fp32, 4, kRow);
  call->out.lse = narrows_view(&call->merged_lse, narrows_fp32, 3, kRow);
  call->dout_view = narrows_view(&call->dout, narrows_fp32, 4, kRow);
  call->dlse_view = narrows_view(&call->dlse, narrows_fp32, 3, kRow);
  call->sinks = narrows_view(&call->sink, narrows_fp32, 1, kRow);
  call->gradient_out = narrows_merge_gradients_default();
  call->gradient_out.parts = call->gradients;
}

static void test_merge(void) {
  merge_call call;
  fill_merge(&call);
  EXPECT(narrows_merge(call.parts, 2, &call.out, NULL, NULL) == narrows_ok);
  EXPECT_NEAR(call.merged, 3);
  EXPECT_NEAR(call.merged_lse, log(4));
  EXPECT(narrows_merge(call.parts, 2, &call.out, &call.sinks, NULL) == narrows_ok); /* 3 + 1 + 4 */
  EXPECT_NEAR(call.merged, 1.5);
  EXPECT_NEAR(call.merged_lse, log(8));
  call.lse[0] = -INFINITY;
  call.o[0] = NAN;
  call.o[1] = 7;
  EXPECT(narrows_merge(call.parts, 2, &call.out, NULL, NULL) == narrows_ok);
  EXPECT_NEAR(call.merged, 7);
  EXPECT_NEAR(call.merged_lse, 0);
  EXPECT(narrows_merge(NULL, 0, &call.out, NULL, NULL) == narrows_ok);
  EXPECT(call.merged == 0 && call.merged_lse == -INFINITY);
}

/* Weight w of a part: dO = w dout, dLSE = w (dout (o - merged) + dlse); of the sink: w (-dout merged + dlse). */
static void test_merge_backward(void) {
  merge_call call;
  fill_merge(&call);
  EXPECT(narrows_merge_backward(call.parts, 2, &call.dout_view, NULL, &call.gradient_out, NULL, NULL) == narrows_ok);
  EXPECT_NEAR(call.do_[0], 0.75);
  EXPECT_NEAR(call.do_[1], 0.25);
  EXPECT_NEAR(call.dlse_[0], 0.75 * (4 - 3));
  EXPECT_NEAR(call.dlse_[1], 0.25 * (0 - 3));
  fill_merge(&call);
  call.gradient_out.dsinks = narrows_view(&call.dsink, narrows_fp32, 1, kRow);
  memset(&call.gradients[1].o, 0, sizeof call.gradients[1].o);
  EXPECT(narrows_merge_backward(call.parts, 2, &call.dout_view, &call.dlse_view, &call.gradient_out, &call.sinks,
                                NULL) == narrows_ok); /* weights 3/8, 1/8 and 1/2, merged 3/2 */
  EXPECT_NEAR(call.do_[0], 3.0 / 8);
  EXPECT(isnan(call.do_[1]));
  EXPECT_NEAR(call.dlse_[0], 3.0 / 8 * (4 - 1.5 + 2));
  EXPECT_NEAR(call.dlse_[1], 1.0 / 8 * (0 - 1.5 + 2));
  EXPECT_NEAR(call.dsink, 0.5 * (-1.5 + 2));
  call.dsink = NAN;
  call.gradient_out.parts = NULL;
  EXPECT(narrows_merge_backward(call.parts, 2, &call.dout_view, &call.dlse_view, &call.gradient_out, &call.sinks,
                                NULL) == narrows_ok);
  EXPECT_NEAR(call.dsink, 0.25);
}

static void test_merge_refusals(void) {
  merge_call call;
  fill_merge(&call);
  EXPECT_REFUSED(narrows_merge(NULL, 2, &call.out, NULL, NULL), narrows_invalid_value,
                 "parts: NULL: this argument is required");
  EXPECT_REFUSED(narrows_merge(call.parts, 2, NULL, NULL, NULL), narrows_invalid_value,
                 "out: NULL: this argument is required");
  call.parts[1].struct_size = 240;
  EXPECT_REFUSED(narrows_merge(call.parts, 2, &call.out, NULL, NULL), narrows_invalid_value,
                 "parts[1].struct_size: 240: must be that of parts[0]; nearest legal: 232");
  fill_merge(&call);
  call.parts[0].struct_size = 0;
  EXPECT_REFUSED(
      narrows_merge(call.parts, 2, &call.out, NULL, NULL), narrows_invalid_value,
      "parts[0].struct_size: 0: must be the sizeof of the struct in the caller's header; nearest legal: 232");
  fill_merge(&call);
  call.parts[1].o.rank = 6;
  EXPECT_REFUSED(narrows_merge(call.parts, 2, &call.out, NULL, NULL), narrows_invalid_value,
                 "parts[1].o.rank: 6: must be in [0, 5]; nearest legal: 5");
  fill_merge(&call);
  call.sinks.dtype = 0;
  EXPECT_REFUSED(narrows_merge(call.parts, 2, &call.out, &call.sinks, NULL), narrows_invalid_type,
                 "sinks.dtype: 0: must be a narrows_dtype, narrows_fp16 (1) to narrows_boolean (8)");
  EXPECT(isnan(call.merged) && isnan(call.merged_lse));
  EXPECT_REFUSED(narrows_merge_backward(call.parts, 2, &call.dout_view, NULL, NULL, NULL, NULL), narrows_invalid_value,
                 "out: NULL: this argument is required");
  EXPECT_REFUSED(narrows_merge_backward(call.parts, 2, NULL, NULL, &call.gradient_out, NULL, NULL),
                 narrows_invalid_value, "dout: not given: this argument is required");
  call.gradient_out.struct_size = 16;
  EXPECT_REFUSED(narrows_merge_backward(call.parts, 2, &call.dout_view, NULL, &call.gradient_out, NULL, NULL),
                 narrows_invalid_value,
                 "out.struct_size: 16: must be the sizeof of the struct in the caller's header; nearest legal: 128");
  EXPECT(isnan(call.do_[0]) && isnan(call.dlse_[1]));
}

/* Parts of a program built with a later header lie further apart. */
static void test_merge_of_newer_parts(void) {
  merge_call call;
  fill_merge(&call);
  struct newer_outputs {
    narrows_outputs known;
    int64_t added;
  } parts[2];
  memset(parts, 0, sizeof parts);
  for (int part = 0; part < 2; ++part) {
    parts[part].known = call.parts[part];
    parts[part].known.struct_size = sizeof parts[part];
  }
  EXPECT(narrows_merge(&parts[0].known, 2, &call.out, NULL, NULL) == narrows_ok);
  EXPECT_NEAR(call.merged, 3);
}

int main(void) {
  test_values();
  test_gradient_of_the_lse();
  test_bias_slopes_and_sinks();
  test_refusals();
  test_workspace_sizes();
  test_merge();
  test_merge_backward();
  test_merge_refusals();
  test_merge_of_newer_parts();
  return report();
}
