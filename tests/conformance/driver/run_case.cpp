#include "conformance/driver/run_case.h"

#include <gtest/gtest.h>

#include "moegemm/error.h"
#include "testing/device/device_problem.h"

namespace moegemm::testing {

void expect_conformance(const Target& target, const ProblemCase& problem, Op op, DType dtype,
                        std::uint64_t seed, std::int64_t row_limit) {
  SCOPED_TRACE(std::string(to_string(op)) + " " + to_string(dtype) + " " + to_string(problem) +
               ", data from seed " + std::to_string(seed));
  const HostProblem host = build_problem(problem, op, dtype, seed);
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  BorrowedMemory lender(*target.memory);
  const auto expect_result = [&](const Plan& plan) {
    target.memory->synchronize();
    EXPECT_EQ(plan.product().backend, target.backend);
    const Comparison comparison = compare(host, device.output(), target.accuracy, row_limit);
    EXPECT_TRUE(comparison.passed()) << to_string(plan) << ": " << describe(comparison);
    EXPECT_EQ(device.trespass(), "");
  };
  Plan plan;
  try {
    plan = device.call(options, lender.context());
  } catch (const Error& error) {
    if (target.may_throw(error)) {
      GTEST_SKIP() << error.what();
    }
    throw;
  }
  expect_result(plan);
  if (plan.workspace_bytes == 0 || target.memory->device().type == DeviceType::kCpu) return;

  // Whoever lends no memory gets another plan for it, or is told what it would take.
  device.reset_output();
  try {
    plan = device.call(options, target.memory->context());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidValue) << error.what();
    EXPECT_NE(std::string(error.what()).find("context.memory is null"), std::string::npos)
        << error.what();
    return;
  }
  EXPECT_EQ(plan.workspace_bytes, 0);
  expect_result(plan);
}

}  // namespace moegemm::testing
