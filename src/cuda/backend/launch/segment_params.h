#pragma once

#include "core/backend.h"
#include "cuda/backend/launch/counted_rows.h"
#include "cuda/device/segments.cuh"

namespace moegemm::cuda {

inline Placement placement_of(const RoutingView& routing, std::int64_t rows) {
  const bool wide = routing.m_sizes.dtype == DType::kInt64;
  const void* starts = routing.ends ? routing.m_sizes.data : routing.starts.data;
  return {{starts, wide}, routing.ends, static_cast<int>(rows)};
}

/// Rows of a pass that grids are made for.
inline std::int64_t planned_rows(const RoutingView& routing, std::int64_t rows) {
  const std::int64_t expected = routing.expected_rows;
  return expected < 0 || expected > rows ? rows : expected;
}

/// The simplest layout, which the fastest passes are for.
inline bool is_packed_with_zeros(const RoutingView& routing) {
  return routing.segments() == Segments::kPacked && routing.tails == Tails::kZero;
}

inline SegmentParams segment_params(const RoutingView& routing, std::int64_t rows,
                                    std::int64_t zeroed_rows) {
  const TensorView& sizes = routing.m_sizes;
  const bool packed = routing.segments() == Segments::kPacked;
  const std::int64_t limit = most_counted_rows(routing.segments(), rows, sizes.shape[0]);
  return {
      .m_sizes = {sizes.data, sizes.dtype == DType::kInt64},
      .placement = placement_of(routing, rows),
      .experts = static_cast<int>(sizes.shape[0]),
      .row_limit = static_cast<int>(limit),
      .zeroed_rows = static_cast<int>(packed && routing.tails == Tails::kZero ? zeroed_rows : 0)};
}

inline SegmentParams segment_params(const Problem& problem, const Operands& operands) {
  return segment_params(segments_view(problem, operands), problem.rows, problem.output_rows());
}

}  // namespace moegemm::cuda
