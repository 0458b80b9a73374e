#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "conformance/cases/random_case.h"
#include "conformance/driver/gpu_problem.h"
#include "conformance/suites.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

std::uint64_t hash_of(const std::vector<unsigned char>& bytes) {
  return seed_from({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

/// MOEGEMM_TEST_STRESS random problems, each run twice: right, and the same bits. The hash over all
/// of them is printed: two machines of one kind, or two builds, can be compared by it.
void stress(const Target& target) {
  const std::int64_t count = environment_number("MOEGEMM_TEST_STRESS", trimmed_run() ? 50 : 400);
  std::uint64_t total_hash = 0;
  std::int64_t run = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t seed = run_seed() * 7'368'787 + static_cast<std::uint64_t>(i);
    Random random(seed);
    const RandomCase drawn = random_case(random, true);
    SCOPED_TRACE("stress problem " + std::to_string(i) + ": " + to_string(drawn.op) + " " +
                 to_string(drawn.dtype) + " " + to_string(drawn.problem));
    ProblemCase spec = drawn.problem;
    spec.accumulate = false;    // each run starts from poison
    spec.repeated_indices = 0;  // of two positions that name one row, either may be stored
    const HostProblem host = build_problem(spec, drawn.op, drawn.dtype, seed);
    DeviceProblem problem(*target.memory, host);
    BorrowedMemory lender(*target.memory);
    const auto first = checked_result(target, *target.memory, host, problem, lender);
    if (!first) continue;
    relaunch(target, *target.memory, problem, &lender);
    target.memory->synchronize();
    ASSERT_EQ(hash_of(problem.output()), hash_of(*first)) << "two runs differ";
    ASSERT_EQ(problem.trespass(), "");
    if (::testing::Test::HasFailure()) return;
    total_hash = total_hash * 31 + hash_of(*first);
    ++run;
  }
  std::printf("%s: %lld of %lld random problems run, hash %016llx\n", target.name().c_str(),
              static_cast<long long>(run), static_cast<long long>(count),
              static_cast<unsigned long long>(total_hash));
}

}  // namespace

void add_stress_tests() {
  for (const Target& target : gpu_targets()) {
    add_test(target.name() + "/stress", "RandomProblemsTwice", [target] { stress(target); });
  }
}

}  // namespace moegemm::testing
