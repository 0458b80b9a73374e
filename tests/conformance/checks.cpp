#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "testing/device/device_problem.h"

namespace moegemm::testing {
namespace {

ProblemCase checked_case(Permutation permutation) {
  ProblemCase c;
  c.name = "Check";
  c.m_sizes = {20, 0, 33, 7};
  c.rows = 64;
  c.topk = 2;
  c.permutation = permutation;
  return c;
}

/// Runs with check on and returns the refusal's message; fails if there is none, or if anything was
/// written before it.
std::string refusal(const Target& target, const HostProblem& host) {
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  options.check = true;
  std::string message;
  try {
    device.call(options, target.memory->context());
    ADD_FAILURE() << "the call was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidValue);
    message = error.what();
  }
  target.memory->synchronize();
  EXPECT_EQ(device.output(), host.out.bytes) << "the output was written although it was refused";
  return message;
}

void expect_words(const std::string& message, std::initializer_list<std::string> words) {
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << '"' << word << "\" is not in: " << message;
  }
}

HostProblem with_sizes(Op op, DType sizes_dtype, std::vector<std::int64_t> sizes) {
  ProblemCase spec = checked_case(Permutation::kNone);
  spec.m_sizes = std::move(sizes);
  spec.sizes_dtype = sizes_dtype;
  return build_problem(spec, op, DType::kBFloat16, run_seed());
}

std::vector<std::int64_t> valid_indices(std::int64_t rows) {
  std::vector<std::int64_t> indices(rows);
  for (std::int64_t r = 0; r < rows; ++r)
    indices[r] = (r * 5 + 3) % rows;  // 5 and 64 have no common divisor
  return indices;
}

HostProblem with_index(Op op, DType index_dtype, std::int64_t row, std::int64_t value) {
  ProblemCase spec = checked_case(op == Op::kDx ? Permutation::kX : Permutation::kY);
  spec.index_dtype = index_dtype;
  HostProblem host = build_problem(spec, op, DType::kBFloat16, run_seed());
  host.gather_indices[row] = value;
  return host;
}

/// Whether the backend runs this op at all; the CPU backends must.
bool takes(const Target& target, Op op) {
  const HostProblem host = with_sizes(op, DType::kInt32, {20, 0, 33, 7});
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  try {
    device.call(options, target.memory->context());
  } catch (const Error& error) {
    if (target.may_throw(error)) return false;
    throw;
  }
  return true;
}

void expect_messages(const Target& target, Op op, DType dtype) {
  if (!takes(target, op)) GTEST_SKIP() << target.name() << " has no kernel for " << to_string(op);
  expect_words(refusal(target, with_sizes(op, dtype, {20, -7, 3, -9})), {"m_sizes[1]", "-7"});
  expect_words(refusal(target, with_sizes(op, dtype, {20, 30, 15, 9})),
               {"m_sizes", "[2]", "65", "64"});
  expect_words(refusal(target, with_index(op, dtype, 41, -3)), {"gather_indices[41]", "-3"});
  expect_words(refusal(target, with_index(op, dtype, 59, 64)), {"gather_indices[59]", "64"});
  HostProblem repeated = with_index(op, dtype, 0, 0);
  repeated.gather_indices = valid_indices(64);
  repeated.gather_indices[41] = repeated.gather_indices[7];
  expect_words(refusal(target, repeated), {"gather_indices[41]", "gather_indices[7]",
                                           std::to_string(repeated.gather_indices[7])});
  if (dtype == DType::kInt64) {
    const std::int64_t aliased = (std::int64_t{1} << 32) + 5;
    expect_words(refusal(target, with_index(op, dtype, 7, aliased)),
                 {"gather_indices[7]", std::to_string(aliased)});
    const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
    expect_words(refusal(target, with_sizes(op, dtype, {5, huge, huge, 1})), {"m_sizes", "[1]"});
  }
}

/// The first of several is named, whatever order threads look in.
void expect_first_fault(const Target& target) {
  ProblemCase spec = checked_case(Permutation::kY);
  spec.m_sizes.assign(700, 7);
  spec.rows = 5000;
  HostProblem host = build_problem(spec, Op::kForward, DType::kBFloat16, run_seed());
  for (const std::int64_t row : {4999, 1234, 777, 3000, 776 + 2048}) host.gather_indices[row] = -1;
  expect_words(refusal(target, host), {"gather_indices[777]"});
  host.spec.m_sizes[650] = -2;
  host.spec.m_sizes[33] = -5;
  expect_words(refusal(target, host), {"m_sizes[33]", "-5"});
}

/// More rows than a GPU's threads look at in one sweep, more experts than a block has threads.
void expect_faults_far_back(const Target& target) {
  ProblemCase spec = checked_case(Permutation::kX);
  spec.m_sizes.assign(1500, 200);
  spec.rows = 300'000;
  HostProblem host = build_problem(spec, Op::kForward, DType::kBFloat16, run_seed());
  host.gather_indices[299'999] = -1;
  expect_words(refusal(target, host), {"gather_indices[299999]", "-1"});
  host.gather_indices[270'000] = 300'000;
  expect_words(refusal(target, host), {"gather_indices[270000]", "300000"});
  host.spec.m_sizes[1499] = -2;
  expect_words(refusal(target, host), {"m_sizes[1499]", "-2"});
}

void expect_valid_passes(const Target& target, Op op, DType dtype) {
  if (!takes(target, op)) GTEST_SKIP() << target.name() << " has no kernel for " << to_string(op);
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    ProblemCase spec = checked_case(permutation);
    spec.sizes_dtype = spec.index_dtype = dtype;
    spec.tail_index = -1;  // of positions that name nothing
    const HostProblem host = build_problem(spec, op, DType::kBFloat16, run_seed());
    DeviceProblem device(*target.memory, host);
    GemmOptions options = device.options();
    options.backend = target.backend;
    options.check = true;
    device.call(options, target.memory->context());
    target.memory->synchronize();
    const Comparison comparison = compare(host, device.output(), target.accuracy);
    EXPECT_TRUE(comparison.passed()) << describe(comparison);
  }
}

void expect_environment_switch(const Target& target) {
  if (!takes(target, Op::kForward)) GTEST_SKIP() << target.name() << " has no forward kernel";
  const HostProblem host = with_sizes(Op::kForward, DType::kInt32, {20, -7, 3, 9});
  DeviceProblem device(*target.memory, host);
  GemmOptions options = device.options();
  options.backend = target.backend;
  setenv("MOEGEMM_CHECK", "1", 1);
  EXPECT_THROW(device.call(options, target.memory->context()), Error);
  unsetenv("MOEGEMM_CHECK");
  EXPECT_NO_THROW(device.call(options, target.memory->context()));
  target.memory->synchronize();
}

}  // namespace

void add_check_tests() {
  for (const Target& target : targets()) {
    for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
      for (const DType dtype : {DType::kInt32, DType::kInt64}) {
        const std::string suffix = std::string("_") + to_string(op) + "_" + to_string(dtype);
        add_test(target.name() + "/Check", "NamesTheFaultAndWritesNothing" + suffix,
                 [&target, op, dtype] { expect_messages(target, op, dtype); });
        add_test(target.name() + "/Check", "LetsValidRoutingPass" + suffix,
                 [&target, op, dtype] { expect_valid_passes(target, op, dtype); });
      }
    }
    add_test(target.name() + "/Check", "NamesTheFirstFault",
             [&target] { expect_first_fault(target); });
    if (!trimmed_run()) {
      add_test(target.name() + "/Check", "NamesFaultsFarBack",
               [&target] { expect_faults_far_back(target); });
    }
    add_test(target.name() + "/Check", "EnvironmentTurnsItOn",
             [&target] { expect_environment_switch(target); });
  }
}

}  // namespace moegemm::testing
