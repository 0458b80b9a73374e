#include <string>

#include "conformance/cases/random_case.h"
#include "conformance/driver/run_case.h"
#include "conformance/driver/targets.h"
#include "conformance/suites.h"

namespace moegemm::testing {

void add_random_tests() {
  const std::int64_t count = environment_number("MOEGEMM_TEST_RANDOM", trimmed_run() ? 20 : 60);
  for (const Target& target : targets()) {
    for (int i = 0; i < count; ++i) {
      add_test(target.name() + "/random", "Number" + std::to_string(i), [&target, i] {
        // Each case has a seed of its own: one can be run alone.
        const std::uint64_t seed = run_seed() * 1'000'003 + static_cast<std::uint64_t>(i);
        Random random(seed);
        const RandomCase drawn = random_case(random, false);
        expect_conformance(target, drawn.problem, drawn.op, drawn.dtype, seed);
      });
    }
  }
}

}  // namespace moegemm::testing
