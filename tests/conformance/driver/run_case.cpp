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
  try {
    const Plan plan = device.call(options, lender.context());
    EXPECT_EQ(plan.backend, target.backend);
  } catch (const Error& error) {
    if (target.may_refuse && error.kind() == ErrorKind::kNotImplemented) {
      GTEST_SKIP() << error.what();
    }
    throw;
  }
  target.memory->synchronize();
  const Comparison comparison = compare(host, device.output(), target.accuracy, row_limit);
  EXPECT_TRUE(comparison.passed()) << describe(comparison);
  EXPECT_EQ(device.trespass(), "");
}

}  // namespace moegemm::testing
