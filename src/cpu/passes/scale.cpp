#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/passes/rows.h"

namespace moegemm::cpu {
namespace {

/// Of one worker: about 10 microseconds of memory traffic.
constexpr std::int64_t kGrainElems = 32 * 1024;

template <typename In, typename Out>
void combine_tokens(const TensorView& rows, const TensorView& weights, const TensorView& positions,
                    std::int64_t topk, const TensorView& out, std::int64_t begin,
                    std::int64_t end) {
  const std::int64_t cols = rows.shape[1];
  std::vector<float> sum(cols);
  for (std::int64_t t = begin; t < end; ++t) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (std::int64_t s = 0; s < topk; ++s) {
      const std::int64_t flat = t * topk + s;
      const std::int64_t position =
          positions.given() ? read_index(positions.data, positions.dtype, flat) : flat;
      if (position < 0 || position >= rows.shape[0]) continue;
      const float weight = weights.given() ? read_float(weights.data, weights.dtype, flat) : 1.0f;
      const In* row = row_of<const In>(rows, position);
      for (std::int64_t c = 0; c < cols; ++c) sum[c] += weight * to_float(row[c]);
    }
    Out* destination = row_of<Out>(out, t);
    for (std::int64_t c = 0; c < cols; ++c) store(sum[c], destination[c]);
  }
}

/// destination = factor * source, element by element; the two may be the same memory.
void scale_row(const TensorView& source, std::int64_t row, float factor,
               const TensorView& destination) {
  with_element_type(source.dtype, [&]<typename In>(In*) {
    with_element_type(destination.dtype, [&]<typename Out>(Out*) {
      const In* from = row_of<const In>(source, row);
      Out* to = row_of<Out>(destination, row);
      for (std::int64_t c = 0; c < source.shape[1]; ++c) store(factor * to_float(from[c]), to[c]);
    });
  });
}

float dot_row(const TensorView& a, const TensorView& b, std::int64_t row) {
  return with_element_type(a.dtype, [&]<typename A>(A*) {
    return with_element_type(b.dtype, [&]<typename B>(B*) {
      const A* left = row_of<const A>(a, row);
      const B* right = row_of<const B>(b, row);
      // Fixed lanes: the same bits whatever the compiler vectorises, and a shorter error chain.
      constexpr std::int64_t kLanes = 16;
      const std::int64_t cols = a.shape[1];
      float lanes[kLanes] = {};
      std::int64_t c = 0;
      for (; c + kLanes <= cols; c += kLanes) {
        for (std::int64_t i = 0; i < kLanes; ++i) {
          lanes[i] += to_float(left[c + i]) * to_float(right[c + i]);
        }
      }
      for (std::int64_t i = 0; c + i < cols; ++i) {
        lanes[i] += to_float(left[c + i]) * to_float(right[c + i]);
      }
      float sum = 0;
      for (const float lane : lanes) sum += lane;
      return sum;
    });
  });
}

}  // namespace

void CpuPasses::combine(const TensorView& rows, const TensorView& weights,
                        const TensorView& positions, std::int64_t topk, const TensorView& out,
                        const ExecutionContext& context) const {
  with_element_type(rows.dtype, [&]<typename In>(In*) {
    with_element_type(out.dtype, [&]<typename Out>(Out*) {
      for_each_range(context, out.shape[0], grain_rows(kGrainElems, rows.shape[1] * topk),
                     [&](std::int64_t begin, std::int64_t end) {
                       combine_tokens<In, Out>(rows, weights, positions, topk, out, begin, end);
                     });
    });
  });
}

void CpuPasses::scale_rows(const TensorView& product, const TensorView& x,
                           const RoutingView& routing, const TensorView& scaled,
                           const TensorView& dot, const TensorView& scaled_x,
                           const ExecutionContext& context) const {
  const std::int64_t rows = x.shape[0];
  const std::int64_t used = segments_of(routing, rows).routed;
  const std::int64_t flat_rows = routing.router_weights.numel();
  // Slots of `dot` are written by index: what no row names stays zero.
  for (std::int64_t i = 0; i < flat_rows; ++i) write_float(dot.data, dot.dtype, i, 0.0f);
  for_each_range(context, rows, grain_rows(kGrainElems, x.shape[1]),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t r = begin; r < end; ++r) {
                     if (r >= used && routing.tails == Tails::kUndefined) return;
                     const std::int64_t flat = r < used ? flat_row(routing, r, flat_rows) : -1;
                     if (flat < 0) {
                       zero_row(scaled, r);
                       zero_row(scaled_x, r);
                       continue;
                     }
                     const float weight = router_weight(routing, flat);
                     write_float(dot.data, dot.dtype, flat, dot_row(product, x, r));
                     scale_row(product, r, weight, scaled);
                     if (scaled_x.given()) scale_row(x, r, weight, scaled_x);
                   }
                 });
}

void CpuPasses::zero_gaps(const TensorView& out, const RoutingView& routing,
                          const ExecutionContext&) const {
  const std::int64_t rows = out.shape[0];
  if (!routing.m_sizes.given()) {
    for (std::int64_t row = 0; row < rows; ++row) zero_row(out, row);
    return;
  }
  for (const SegmentList::Segment& gap : segments_of(routing, rows).gaps) {
    for (std::int64_t row = gap.begin; row < gap.end; ++row) zero_row(out, row);
  }
}

}  // namespace moegemm::cpu
