#include "tools/report.hpp"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <limits>

namespace narrows::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

Report report_of(bool passed) {
  Report report;
  report.call = "layer1";
  report.problem.dtype = DType::bf16;
  report.work = {.pairs = 4, .flops = 4e9, .fused_bytes = 1000, .three_kernel_bytes = 2500};
  report.q.shape = report.k.shape = report.v.shape = {1, 2, 1, 8};
  report.threads = 1;
  report.seconds = {0.25, 0.5, 1, 2};
  Verdict good, bad;
  good.name = "lse";
  bad.name = "o";
  bad.passed = passed;
  bad.worst = passed ? 0.5 : std::numeric_limits<double>::infinity();
  bad.where = {0, 1, 0, 3};
  bad.error = 0.125;
  bad.plain_error = 0.25;
  report.verdicts = {bad, good};
  report.differences = {{"o", 0.5}};
  return report;
}

TEST(CliReport, a_wrong_result_says_so_and_where) {
  const Report report = report_of(false);
  EXPECT_FALSE(report.passed());
  EXPECT_THAT(text(report),
              HasSubstr("error vs fp64  o   1.25e-01, three-kernel attention in bf16 2.50e-01: FAILED\n"));
  EXPECT_THAT(text(report), HasSubstr("o fails: worst o[0, 1, 0, 3]"));
  const nlohmann::json object = nlohmann::json::parse(json(report));
  EXPECT_EQ(object["passed"], false);
  EXPECT_EQ(object["check"]["o"]["passed"], false);
  EXPECT_EQ(object["check"]["lse"]["passed"], true);
  EXPECT_TRUE(object["check"]["o"]["worst"].is_null());
  EXPECT_EQ(object["check"]["o"]["where"], (nlohmann::json{0, 1, 0, 3}));
}

TEST(CliReport, a_right_result_stays_short) {
  const Report report = report_of(true);
  EXPECT_TRUE(report.passed());
  EXPECT_THAT(text(report), Not(HasSubstr("worst")));
  EXPECT_THAT(text(report), HasSubstr("layer1: "));
  EXPECT_THAT(text(report), HasSubstr("time           750 ms (median of 4, best 250 ms), 1 thread\n"));
  EXPECT_THAT(text(report), HasSubstr("speed          5.3 GFLOP/s\n"));
  EXPECT_THAT(text(report), HasSubstr("memory moved   1 kB; three-kernel attention 2.5 kB, 2.5 times as much\n"));
  EXPECT_THAT(text(report), HasSubstr("vs file's own  o   5.00e-01 at most\n"));
  EXPECT_EQ(nlohmann::json::parse(json(report))["ms"], 750.0);
}

TEST(CliReport, says_what_computed) {
  Report report = report_of(true);
  report.threads = 2;
  EXPECT_THAT(text(report), HasSubstr("best 250 ms), 2 threads\n"));
  report.threads = 0;
  report.problem.device = {DeviceKind::cuda, 1};
  report.machine = "a GPU";
  EXPECT_THAT(text(report), HasSubstr("best 250 ms), cuda:1 a GPU\n"));
  const nlohmann::json object = nlohmann::json::parse(json(report));
  EXPECT_EQ(object["device"], "cuda:1");
  EXPECT_EQ(object["machine"], "a GPU");
  EXPECT_EQ(object["threads"], 0);
}

}  // namespace
}  // namespace narrows::cli
