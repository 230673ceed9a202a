/* What the C programs of tests/api share: expectations, and a call small enough to know by hand. */
#pragma once

#include <math.h>
#include <narrows/narrows.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)
#define EXPECT_NEAR(actual, expected) expect_near((double)(actual), (expected), #actual, __LINE__)
#define EXPECT_REFUSED(call, status, text) expect_refused((call), (status), (text), __LINE__)

static inline void expect(int holds, const char* what, int line) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "line %d: %s does not hold; last error \"%s\"\n", line, what, narrows_last_error());
}

static inline void expect_near(double actual, double expected, const char* what, int line) {
  if (fabs(actual - expected) <= 2e-6 * fmax(1, fabs(expected))) return;
  ++failures;
  fprintf(stderr, "line %d: %s is %.9g, not %.9g\n", line, what, actual, expected);
}

static inline void expect_refused(narrows_status actual, narrows_status expected, const char* text, int line) {
  if (actual == expected && strcmp(narrows_last_error(), text) == 0) return;
  ++failures;
  fprintf(stderr, "line %d: status %d, not %d; text\n  \"%s\", not\n  \"%s\"\n", line, (int)actual, (int)expected,
          narrows_last_error(), text);
}

/* One head, two queries, two keys. With scale 1 the logits are (ln 3, 0) and (0, 0), so P is (3/4, 1/4) and (1/2, 1/2). */
typedef struct small_call {
  float q[2][2], k[2][2], v[2][2], o[2][2], lse[2];
  narrows_inputs in;
  narrows_outputs out;
  narrows_options options;
} small_call;

static const int64_t kShape[] = {1, 2, 1, 2};
static const int64_t kLseShape[] = {1, 1, 2};

static inline int report(void) {
  if (failures) fprintf(stderr, "%d expectations failed\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

static inline void fill(small_call* call) {
  const float ln3 = 1.0986122887f;
  const float q[2][2] = {{1, 0}, {0, 1}};
  const float k[2][2] = {{ln3, 0}, {0, 0}};
  const float v[2][2] = {{4, 8}, {0, 4}};
  memcpy(call->q, q, sizeof q);
  memcpy(call->k, k, sizeof k);
  memcpy(call->v, v, sizeof v);
  for (int i = 0; i < 2; ++i) call->lse[i] = call->o[i][0] = call->o[i][1] = NAN;
  call->in = narrows_inputs_default();
  call->in.q = narrows_view(call->q, narrows_fp32, 4, kShape);
  call->in.k = narrows_view(call->k, narrows_fp32, 4, kShape);
  call->in.v = narrows_view(call->v, narrows_fp32, 4, kShape);
  call->out = narrows_outputs_default();
  call->out.o = narrows_view(call->o, narrows_fp32, 4, kShape);
  call->options = narrows_options_default();
  call->options.has_scale = 1;
  call->options.scale = 1;
}
