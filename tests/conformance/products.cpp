#include <string>
#include <vector>

#include "conformance/cases/cases.h"
#include "conformance/driver/run_case.h"
#include "conformance/driver/targets.h"
#include "conformance/suites.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

constexpr Op kOps[] = {Op::kForward, Op::kDx, Op::kDw};
constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

/// A trimmed run takes each case once, with product and dtype in turn, and leaves out those whose
/// work a sanitizer turns into seconds.
bool kept_when_trimmed(const ProblemCase& problem, std::size_t case_number, int combination) {
  return problem.work() < 4e6 && combination == static_cast<int>(case_number * 5 % 9);
}

/// The same cases in fp32 where TF32 is allowed. Activations are passes there, which have cases in
/// fp32.
void add_tf32_tests(const Target& target) {
  static const std::vector<ProblemCase> cases = [] {
    std::vector<ProblemCase> list = all_cases();
    std::erase_if(list, [](const ProblemCase& c) { return c.activation || c.quantised(); });
    for (ProblemCase& c : list) c.tf32 = true;
    return list;
  }();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    for (int op = 0; op < 3; ++op) {
      const ProblemCase& problem = cases[i];
      if (!applies(problem, kOps[op], DType::kFloat32)) continue;
      if (trimmed_run() && !problem.accumulate && !kept_when_trimmed(problem, i, op * 3)) continue;
      add_test(target.name() + "/" + to_string(kOps[op]) + "/tf32", problem.name,
               [&target, &problem, op] {
                 expect_conformance(target, problem, kOps[op], DType::kFloat32,
                                    seed_from(problem.name) + run_seed());
               });
    }
  }
}

}  // namespace

void add_product_tests() {
  static const std::vector<ProblemCase> cases = all_cases();
  for (const Target& target : targets()) {
    if (target.on_gpu()) add_tf32_tests(target);
    for (int op = 0; op < 3; ++op) {
      for (int dtype = 0; dtype < 3; ++dtype) {
        const std::string suite =
            target.name() + "/" + to_string(kOps[op]) + "/" + to_string(kDtypes[dtype]);
        for (std::size_t i = 0; i < cases.size(); ++i) {
          const ProblemCase& problem = cases[i];
          if (!applies(problem, kOps[op], kDtypes[dtype])) continue;
          if (trimmed_run() && !problem.accumulate &&
              !kept_when_trimmed(problem, i, op * 3 + dtype)) {
            continue;
          }
          if (target.backend == BackendKind::kReference && problem.work() > kMostReferenceWork &&
              dtype != static_cast<int>(i % 3)) {
            continue;
          }
          add_test(suite, problem.name, [&target, &problem, op, dtype] {
            expect_conformance(target, problem, kOps[op], kDtypes[dtype],
                               seed_from(problem.name) + run_seed());
          });
        }
      }
    }
  }
}

}  // namespace moegemm::testing
