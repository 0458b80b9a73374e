#include "cuda/sm90/heuristic.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace moegemm::cuda::sm90 {
namespace {

/// A row kernel by its tile: features x rows.
struct Shape {
  int features;
  int rows;
};

constexpr Shape kSmall = {128, 64};  ///< streams weights, few rows
constexpr Shape kTall = {128, 192};  ///< pingpong: its stores hide behind the other main loop
constexpr Shape kBalanced = {192,
                             128};   ///< pingpong, two tiles of 128 rows waste less than 2 x 192
constexpr Shape kWide = {256, 160};  ///< cooperative: least gathering per product
constexpr Shape kWideInOrder = {256, 128};
constexpr Shape kWideDx = {256, 192};

using Preference = std::array<Shape, 4>;

/// Best first; what is not compiled or not feasible for a problem is passed over. The borders are
/// those where the kernels' speeds cross on an H200 (docs/benchmarks).
Preference preference(const Problem& problem) {
  const double experts = std::max<double>(1, std::min<double>(problem.experts, problem.rows));
  const double rows = static_cast<double>(problem.rows) / experts;  // average of those in use
  const bool forward = problem.op == Op::kForward;
  const Shape wide = !forward ? kWideDx : (problem.gathers() ? kWide : kWideInOrder);
  if (rows <= 64) return {kSmall, kBalanced, kTall, wide};
  if (rows <= 200) return {kTall, kBalanced, wide, kSmall};
  const std::int64_t depth = forward ? problem.k : problem.n;
  if (forward && problem.gathers()) return {wide, kBalanced, kTall, kSmall};
  if (rows <= 320) return {kBalanced, kTall, wide, kSmall};
  if (depth <= 2048) return {kTall, wide, kBalanced, kSmall};
  return {wide, kTall, kBalanced, kSmall};
}

}  // namespace

int preference_rank(const KernelInfo& kernel, const Problem& problem) {
  if (problem.op == Op::kDw) return 0;  // the list is in order of preference
  const Preference order = preference(problem);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (kernel.tile.cols == order[i].features && kernel.tile.rows == order[i].rows) {
      return static_cast<int>(i);
    }
  }
  return static_cast<int>(order.size());
}

}  // namespace moegemm::cuda::sm90
