#include <algorithm>
#include <numeric>
#include <vector>

#include "core/backend.h"
#include "cpu/routing_data.h"

namespace moegemm {
namespace {

using cpu::read_index;
using cpu::SegmentList;
using What = RoutingFault::What;

/// Segments from row 0 on, one after the other.
std::optional<RoutingFault> check_sizes(const RoutingView& routing, std::int64_t rows) {
  const TensorView& m_sizes = routing.m_sizes;
  std::int64_t sum = 0;
  for (std::int64_t e = 0; e < m_sizes.shape[0]; ++e) {
    const std::int64_t size = read_index(m_sizes.data, m_sizes.dtype, e);
    if (size < 0) return RoutingFault{What::kNegativeSize, e, size};
    if (__builtin_add_overflow(sum, size, &sum)) sum = INT64_MAX;
    if (sum > rows) return RoutingFault{What::kSizesExceedRows, e, sum};
  }
  return std::nullopt;
}

/// Segments anywhere: inside the rows, and no row in two of them.
std::optional<RoutingFault> check_places(const RoutingView& routing, std::int64_t rows) {
  const TensorView& m_sizes = routing.m_sizes;
  std::vector<SegmentList::Segment> told;
  for (std::int64_t e = 0; e < m_sizes.shape[0]; ++e) {
    const std::int64_t size = read_index(m_sizes.data, m_sizes.dtype, e);
    if (!routing.ends && size < 0) return RoutingFault{What::kNegativeSize, e, size};
    const SegmentList::Segment segment = cpu::told_segment(routing, e, 0);
    const bool empty = segment.begin == segment.end;
    if (segment.end < segment.begin || (!empty && (segment.begin < 0 || segment.end > rows))) {
      return RoutingFault{What::kSegmentOutside, e, segment.begin, segment.end};
    }
    told.push_back(segment);
  }
  std::vector<std::int64_t> order(told.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](std::int64_t e) { return told[e].size() == 0; });
  std::ranges::stable_sort(order, {}, [&](std::int64_t e) { return told[e].begin; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (told[order[i]].begin < told[order[i - 1]].end) {
      return RoutingFault{What::kSegmentsOverlap, order[i], told[order[i]].begin, order[i - 1]};
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<RoutingFault> find_routing_fault(const RoutingView& routing, std::int64_t rows,
                                               std::int64_t flat_rows) {
  const bool packed = routing.segments() == Segments::kPacked;
  if (auto fault = packed ? check_sizes(routing, rows) : check_places(routing, rows)) return fault;
  if (!routing.gather_indices.given()) return std::nullopt;
  const TensorView& indices = routing.gather_indices;
  std::vector<std::int64_t> first_at(flat_rows, -1);  // position of each index
  for (const SegmentList::Segment& segment : cpu::segments_of(routing, rows).segments) {
    for (std::int64_t r = segment.begin; r < segment.end; ++r) {
      const std::int64_t index = read_index(indices.data, indices.dtype, r);
      if (index < 0 || index >= flat_rows) return RoutingFault{What::kIndexOutOfRange, r, index};
      if (first_at[index] >= 0) {
        return RoutingFault{What::kDuplicateIndex, r, index, first_at[index]};
      }
      first_at[index] = r;
    }
  }
  return std::nullopt;
}

}  // namespace moegemm
