#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// Reads what the router wrote, by the rules for bad data: negative sizes count as 0, segments are
/// clipped at both ends of the rows. Nothing read here is trusted by more than that.
namespace moegemm::cpu {

inline std::int64_t read_index(const void* data, DType dtype, std::int64_t i) {
  return dtype == DType::kInt32 ? static_cast<const std::int32_t*>(data)[i]
                                : static_cast<const std::int64_t*>(data)[i];
}

inline void write_index(void* data, DType dtype, std::int64_t i, std::int64_t value) {
  if (dtype == DType::kInt32) {
    static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value);
  } else {
    static_cast<std::int64_t*>(data)[i] = value;
  }
}

/// The rows of each expert.
struct SegmentList {
  struct Segment {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t size() const { return end - begin; }
  };
  std::vector<Segment> segments;
  std::int64_t rows = 0;      ///< of the tensor
  std::int64_t routed = 0;    ///< in segments
  bool disjoint = true;       ///< no row is in two of them
  std::vector<Segment> gaps;  ///< what is in none, in order

  const Segment& operator[](std::int64_t expert) const { return segments[expert]; }
};

/// A segment as the data says it, before it is clipped. Sums saturate.
inline SegmentList::Segment told_segment(const RoutingView& routing, std::int64_t e,
                                         std::int64_t begin_if_packed) {
  const TensorView& sizes = routing.m_sizes;
  const std::int64_t told = read_index(sizes.data, sizes.dtype, e);
  if (routing.ends) return {e == 0 ? 0 : read_index(sizes.data, sizes.dtype, e - 1), told};
  SegmentList::Segment segment = {begin_if_packed, 0};
  if (routing.starts.given()) segment.begin = read_index(routing.starts.data, sizes.dtype, e);
  const std::int64_t size = std::max<std::int64_t>(told, 0);
  if (__builtin_add_overflow(segment.begin, size, &segment.end)) segment.end = INT64_MAX;
  return segment;
}

inline SegmentList segments_of(const RoutingView& routing, std::int64_t rows) {
  using Segment = SegmentList::Segment;
  SegmentList list;
  list.rows = rows;
  const std::int64_t experts = routing.m_sizes.shape[0];
  list.segments.reserve(static_cast<std::size_t>(experts));
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t before = e == 0 ? 0 : list.segments.back().end;
    Segment segment = told_segment(routing, e, before);
    segment.begin = std::clamp<std::int64_t>(segment.begin, 0, rows);
    segment.end = std::clamp<std::int64_t>(segment.end, segment.begin, rows);
    list.routed += segment.size();
    list.segments.push_back(segment);
  }
  if (routing.segments() == Segments::kPacked) {
    if (list.routed < rows) list.gaps.push_back({list.routed, rows});
    return list;
  }
  std::vector<Segment> sorted;
  for (const Segment& segment : list.segments) {
    if (segment.size() > 0) sorted.push_back(segment);
  }
  std::ranges::sort(sorted, {}, &Segment::begin);
  std::int64_t reached = 0;
  for (const Segment& segment : sorted) {
    if (segment.begin > reached) list.gaps.push_back({reached, segment.begin});
    list.disjoint &= segment.begin >= reached;
    reached = std::max(reached, segment.end);
  }
  if (reached < rows) list.gaps.push_back({reached, rows});
  return list;
}

}  // namespace moegemm::cpu
