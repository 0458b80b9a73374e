#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <set>
#include <string>

#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "moegemm/info.h"

namespace {

constexpr int kSkipped = 77;  // CTest's SKIP_RETURN_CODE

/// Whether MOEGEMM_CPU_ISA asks for an instruction set that this CPU lacks: there is nothing to
/// test then.
bool isa_missing(const std::string& isa) {
  try {
    const auto known = moegemm::cpu_info().isas;
    if (std::ranges::find(known, isa) != known.end()) return false;
    std::printf("Skipped: this CPU cannot run %s; it has", isa.c_str());
    for (const std::string& name : known) std::printf(" %s", name.c_str());
    std::printf("\n");
  } catch (const moegemm::Error& error) {
    std::printf("Skipped: %s\n", error.what());
  }
  return true;
}

/// Remembers why tests were skipped: brief output does not say.
class SkipReasons final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.skipped()) reasons_.insert(result.message());
  }
  const std::set<std::string>& all() const { return reasons_; }

 private:
  std::set<std::string> reasons_;
};

/// What the process should exit with: a run that tested nothing must not look like one that passed.
int exit_status(int status, const SkipReasons& skipped) {
  const ::testing::UnitTest& run = *::testing::UnitTest::GetInstance();
  if (run.test_to_run_count() == 0) {
    if (std::getenv("GTEST_TOTAL_SHARDS")) return kSkipped;  // more parts than tests
    std::fprintf(stderr, "no test has a name that the filter takes\n");
    return 1;
  }
  if (status != 0 || run.successful_test_count() > 0 || skipped.all().empty()) return status;
  for (const std::string& reason : skipped.all()) std::printf("Skipped: %s\n", reason.c_str());
  return kSkipped;
}

void add_all_tests() {
  using namespace moegemm::testing;
  add_unavailable_tests();
  add_product_tests();
  add_random_tests();
  add_invariance_tests();
  add_check_tests();
  add_route_tests();
  add_row_tests();
  add_exchange_tests();
  add_activation_tests();
  add_expert_sum_tests();
  add_fused_activation_tests();
  add_factor_tests();
  add_quantised_tests();
#if MOEGEMM_HAS_CUDA
  add_graph_tests();
  add_concurrency_tests();
  add_layer_tests();
  add_plan_tests();
  add_stress_tests();
#endif
  add_large_offset_tests();
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    const char* isa = std::getenv("MOEGEMM_CPU_ISA");
    if (isa != nullptr && isa_missing(isa)) return kSkipped;
    add_all_tests();
    std::printf("MOEGEMM_TEST_SEED=%llu\nCPU instruction set: %s\n",
                static_cast<unsigned long long>(moegemm::testing::run_seed()),
                moegemm::cpu_info().isa.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cannot list the tests: %s\n", error.what());
    return 1;
  }
  auto* skipped = new SkipReasons;  // GoogleTest deletes it
  ::testing::UnitTest::GetInstance()->listeners().Append(skipped);
  const int status = RUN_ALL_TESTS();
  return exit_status(status, *skipped);
}
