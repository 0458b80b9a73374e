#include "conformance/driver/gpu_problem.h"

#include <gtest/gtest.h>

#include "moegemm/error.h"

namespace moegemm::testing {

ProblemCase busy_case(Permutation permutation, std::int64_t scale) {
  ProblemCase c;
  c.name = "Busy";
  c.m_sizes = {100 * scale, 0, 257 * scale, 1, 64 * scale, 333 * scale};
  c.rows = 760 * scale;
  c.topk = permutation == Permutation::kNone ? 1 : 4;
  c.n = 520;
  c.k = 264;
  c.permutation = permutation;
  c.multiply = permutation == Permutation::kY;
  return c;
}

std::vector<Target> gpu_targets() {
  std::vector<Target> found;
  for (const Target& target : targets()) {
    if (target.memory->device().type == DeviceType::kCuda) found.push_back(target);
  }
  return found;
}

void relaunch(const Target& target, Memory& memory, DeviceProblem& problem, MemorySupport* lender) {
  problem.poison_output(memory);
  GemmOptions options = problem.options();
  options.backend = target.backend;
  ExecutionContext context = memory.context();
  context.memory = lender;
  problem.call(options, context);
}

std::optional<std::vector<unsigned char>> checked_result(const Target& target, Memory& memory,
                                                         const HostProblem& host,
                                                         DeviceProblem& problem,
                                                         MemorySupport& lender) {
  try {
    relaunch(target, memory, problem, &lender);
  } catch (const Error& error) {
    if (target.may_throw(error)) return std::nullopt;
    throw;
  }
  memory.synchronize();
  std::vector<unsigned char> result = problem.output();
  const Comparison comparison = compare(host, result, target.accuracy);
  EXPECT_TRUE(comparison.passed()) << describe(comparison);
  return result;
}

}  // namespace moegemm::testing
