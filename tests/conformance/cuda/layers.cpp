#include <string>
#include <utility>

#include "conformance/driver/gpu_problem.h"
#include "conformance/driver/large_problem.h"
#include "conformance/suites.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

/// The first GEMM of a real layer: more than 2^32 weight elements. Routing is uneven, with experts
/// left out; a few of the last rows belong to nobody.
LargeProblem layer(std::string name, Op op, std::int64_t experts, std::int64_t rows) {
  LargeProblem p;
  p.name = std::move(name) + "_" + to_string(op) + "_M" + std::to_string(rows);
  p.op = op;
  p.experts = experts;
  p.n = 4096;
  p.k = 7168;
  p.rows = rows;
  p.permutation = Permutation::kX;
  p.m_sizes.assign(experts, 0);
  Random random(seed_from(p.name));
  for (std::int64_t r = 0; r < rows - rows / 16; ++r) {
    const std::int64_t e = random.below(experts);
    ++p.m_sizes[e % 7 == 3 ? experts - 1 : e];
  }
  return p;
}

}  // namespace

void add_layer_tests() {
  if (trimmed_run()) return;
  static std::vector<LargeProblem> layers;
  for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
    layers.push_back(layer("DeepSeekV3", op, 256, 4096));
    layers.push_back(layer("KimiK2", op, 384, 4096));
  }
  layers.push_back(layer("DeepSeekV3Decode", Op::kForward, 256, 8));
  layers.push_back(layer("KimiK2Decode", Op::kForward, 384, 64));
  for (const Target& target : gpu_targets()) {
    for (const LargeProblem& problem : layers) {
      add_test(target.name() + "/layer", problem.name,
               [target, &problem] { expect_large_conformance(target, problem, 24); });
    }
  }
}

}  // namespace moegemm::testing
