#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "conformance/cases/cases.h"
#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "moegemm/info.h"
#include "testing/device/device_problem.h"
#include "testing/numerics/random.h"

/// Kernels that activate their own rows, each by its name and so whether the planner would take it
/// or not: right, and with the bits of the product with a pass after it.
namespace moegemm::testing {
namespace {

using Bytes = std::vector<unsigned char>;

struct Result {
  std::string kernel;
  bool apart = false;  ///< the activation was a pass of its own
  Bytes bits;
};

/// Nothing where the kernel does not run the problem.
std::optional<Result> run_named(const Target& target, const HostProblem& host,
                                const std::string& kernel) {
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  options.config.emplace().kernel = kernel;
  BorrowedMemory lender(*target.memory);
  Result result{kernel, false, {}};
  try {
    result.apart = device.call(options, lender.context()).has(StepKind::kActivate);
  } catch (const Error& error) {
    const bool refusal =
        error.kind() == ErrorKind::kNotImplemented || error.kind() == ErrorKind::kInvalidValue;
    if (refusal) return {};
    throw;
  }
  target.memory->synchronize();
  EXPECT_EQ(device.trespass(), "") << kernel;
  result.bits = device.output();
  return result;
}

void expect_fused_conformance(const Target& target, const ProblemCase& problem, Op op,
                              DType dtype) {
  const HostProblem host = build_problem(problem, op, dtype, seed_from(problem.name) + run_seed());
  std::optional<Result> apart;
  std::vector<Result> fused;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.backend != target.backend || kernel.op != op) continue;
    std::optional<Result> result = run_named(target, host, kernel.name);
    if (!result) continue;
    if (!result->apart) {
      fused.push_back(std::move(*result));
    } else if (!apart) {
      apart = std::move(result);
    }
  }
  if (fused.empty()) GTEST_SKIP() << "no kernel of " << target.name() << " fuses this";
  for (const Result& result : fused) {
    const Comparison comparison = compare(host, result.bits, target.accuracy);
    ASSERT_TRUE(comparison.passed()) << result.kernel << ": " << describe(comparison);
    if (apart) {
      ASSERT_EQ(result.bits, apart->bits) << "the bits of " << result.kernel << " are not those of "
                                          << apart->kernel << " with its activation after it";
    }
  }
}

bool has_fusing_kernel(const Target& target, Op op) {
  const std::vector<KernelInfo> all = kernels();
  return std::any_of(all.begin(), all.end(), [&](const KernelInfo& kernel) {
    return kernel.backend == target.backend && kernel.op == op &&
           kernel.name.find("_activated_") != std::string::npos;
  });
}

}  // namespace

void add_fused_activation_tests() {
  static const std::vector<ProblemCase> cases = epilogue_cases();
  for (const Target& target : targets()) {
    for (const Op op : {Op::kForward, Op::kDx}) {
      if (!has_fusing_kernel(target, op)) continue;
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        for (const ProblemCase& problem : cases) {
          if (!problem.activation || !applies(problem, op, dtype)) continue;
          add_test(target.name() + "/FusedActivation",
                   std::string(to_string(op)) + "_" + to_string(dtype) + "_" + problem.name,
                   [&target, &problem, op, dtype] {
                     expect_fused_conformance(target, problem, op, dtype);
                   });
        }
      }
    }
  }
}

}  // namespace moegemm::testing
