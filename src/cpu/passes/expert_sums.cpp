#include <vector>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/passes/rows.h"

namespace moegemm::cpu {
namespace {

/// Which row of the input expert-ordered position `r` reads and what it counts; -1: none.
struct SourceRow {
  std::int64_t row = -1;
  float weight = 1.0f;
};

SourceRow source_of(const RoutingView& routing, std::int64_t r, std::int64_t flat_rows) {
  if (!routing.gather_indices.given()) return {r, 1.0f};
  const std::int64_t flat = flat_row(routing, r, flat_rows);
  if (flat < 0) return {};
  return {flat / routing.topk, router_weight(routing, flat)};
}

template <typename In, typename Out>
void sum_expert(const TensorView& rows, const RoutingView& routing, std::int64_t begin,
                std::int64_t end, Out* out) {
  const std::int64_t cols = rows.shape[1];
  const std::int64_t flat_rows = rows.shape[0] * routing.topk;
  std::vector<float> sum(cols, 0.0f);
  for (std::int64_t r = begin; r < end; ++r) {
    const SourceRow source = source_of(routing, r, flat_rows);
    if (source.row < 0) continue;
    const In* row = row_of<const In>(rows, source.row);
    for (std::int64_t c = 0; c < cols; ++c) sum[c] += source.weight * to_float(row[c]);
  }
  for (std::int64_t c = 0; c < cols; ++c) store(sum[c], out[c]);
}

}  // namespace

void CpuPasses::expert_sums(const TensorView& rows, const RoutingView& routing,
                            const TensorView& sums, const ExecutionContext& context) const {
  const std::int64_t count =
      routing.gather_indices.given() ? routing.gather_indices.shape[0] : rows.shape[0];
  const std::int64_t experts = routing.m_sizes.shape[0];
  const SegmentList segments = segments_of(routing, count);
  with_element_type(rows.dtype, [&]<typename In>(In*) {
    with_element_type(sums.dtype, [&]<typename Out>(Out*) {
      for_each_range(context, experts, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t e = begin; e < end; ++e) {
          sum_expert<In>(rows, routing, segments[e].begin, segments[e].end, row_of<Out>(sums, e));
        }
      });
    });
  });
}

}  // namespace moegemm::cpu
