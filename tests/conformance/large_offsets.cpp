#include <string>
#include <utility>
#include <vector>

#include "conformance/driver/large_problem.h"
#include "conformance/suites.h"

namespace moegemm::testing {
namespace {

/// 1026 * 2048 * 2056 = 4.32e9 elements > 2^32. Rows on a few experts, the first and last included.
LargeProblem many_weights(std::string name, Op op, Permutation permutation) {
  LargeProblem p;
  p.name = std::move(name);
  p.op = op;
  p.experts = 1026;
  p.n = 2048;
  p.k = 2056;
  p.permutation = permutation;
  p.m_sizes.assign(p.experts, 0);
  for (const std::int64_t e : {0, 1, 509, 510, 511, 1020, 1025}) p.m_sizes[e] = 1 + e % 3;
  p.rows = 0;
  for (const std::int64_t size : p.m_sizes) p.rows += size;
  return p;
}

/// More than 2^31 bytes of packed values, 2^32 values of those with four bits, in experts so small
/// that the reference is quick. Rows on both sides of 2^31 values and bytes.
LargeProblem many_packed_weights(const std::string& weights, ScaleType scale_type, Op op) {
  LargeProblem p;
  std::string format = weights;
  for (char& c : format) c = c == '/' ? '_' : c;
  p.name = std::string(op == Op::kForward ? "Forward" : "Dx") + "ReadsPackedWeightsBeyond2To31_" +
           format;
  p.op = op;
  p.experts = weights.starts_with("fp8") ? 4100 : 8200;
  p.n = 1024;
  p.k = 512;
  p.weights = weights;
  p.scale_type = scale_type;
  p.m_sizes.assign(p.experts, 0);
  for (const std::int64_t e : {0, 1, 2047, 4095, 4096, 4099}) p.m_sizes[e] = 1 + e % 3;
  for (const std::int64_t e : {p.experts - 9, p.experts - 1}) p.m_sizes[e] = 2;
  p.rows = 0;
  for (const std::int64_t size : p.m_sizes) p.rows += size;
  return p;
}

std::vector<LargeProblem> packed_problems() {
  std::vector<LargeProblem> problems;
  for (const Op op : {Op::kForward, Op::kDx}) {
    problems.push_back(many_packed_weights("mxfp4", ScaleType::kE8m0, op));
    problems.push_back(many_packed_weights("fp8/128x128", ScaleType::kFloat32, op));
    problems.push_back(many_packed_weights("fp8/channel", ScaleType::kFloat32, op));
    problems.push_back(many_packed_weights("int4/32", ScaleType::kBFloat16, op));
    problems.push_back(many_packed_weights("nf4/64", ScaleType::kFloat32, op));
  }
  return problems;
}

/// 1,048,640 rows of 2056 elements = 2.16e9 > 2^31 on one side, 8 on the other.
LargeProblem many_rows(std::string name, Op op, bool wide_n, Permutation permutation) {
  return {.name = std::move(name),
          .op = op,
          .experts = 7,
          .n = wide_n ? 2056 : 8,
          .k = wide_n ? 8 : 2056,
          .rows = 1'048'640,
          .permutation = permutation,
          .m_sizes = {}};
}

/// Rows of an expert that are more than L2 keeps: kernels may order their tiles in another way.
LargeProblem long_rows(std::string name, Op op, Permutation permutation) {
  const bool forward = op == Op::kForward;
  return {.name = std::move(name),
          .op = op,
          .experts = 3,
          .n = forward ? 600 : 65'536,
          .k = forward ? 65'536 : 600,
          .rows = 900,
          .permutation = permutation,
          .m_sizes = {300, 1, 599}};
}

}  // namespace

void add_large_offset_tests() {
  if (trimmed_run()) return;
  static const LargeProblem problems[] = {
      many_weights("ForwardReadsWeightsBeyond2To32", Op::kForward, Permutation::kNone),
      many_weights("DxReadsWeightsBeyond2To32", Op::kDx, Permutation::kNone),
      many_weights("DwWritesBeyond2To32", Op::kDw, Permutation::kNone),
      many_rows("ForwardWritesBeyond2To31", Op::kForward, true, Permutation::kNone),
      many_rows("ForwardScattersBeyond2To31", Op::kForward, true, Permutation::kY),
      many_rows("ForwardGathersBeyond2To31", Op::kForward, false, Permutation::kX),
      many_rows("DxScattersBeyond2To31", Op::kDx, false, Permutation::kX),
      many_rows("DxGathersBeyond2To31", Op::kDx, true, Permutation::kY),
      many_rows("DwGathersXBeyond2To31", Op::kDw, false, Permutation::kX),
      many_rows("DwGathersDyBeyond2To31", Op::kDw, true, Permutation::kY),
      long_rows("ForwardScattersLongContractions", Op::kForward, Permutation::kY),
      long_rows("DxGathersLongContractions", Op::kDx, Permutation::kY),
  };
  static const std::vector<LargeProblem> packed = packed_problems();
  for (const Target& target : targets()) {
    for (const LargeProblem& problem : problems) {
      // The reference's plain loops would take minutes over a million rows.
      if (target.backend == BackendKind::kReference && problem.work() > 1e9) continue;
      // A row of dW sums a whole segment, a long one its contraction: fewer of them cost as much as
      // many of Y.
      const bool long_sums = problem.op == Op::kDw ? problem.rows > 1'000'000 : problem.rows < 1000;
      const std::int64_t sampled = long_sums && problem.work() > 1e9 ? 8 : 64;
      add_test(target.name() + "/slow", problem.name, [&target, &problem, sampled] {
        expect_large_conformance(target, problem, sampled);
      });
    }
    for (const LargeProblem& problem : packed) {
      add_test(target.name() + "/slow", problem.name,
               [&target, &problem] { expect_large_conformance(target, problem, problem.rows); });
    }
  }
}

}  // namespace moegemm::testing
