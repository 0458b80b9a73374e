#pragma once

#include <cstdint>

#include "moegemm/export.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Sorts the M = T * topk routed rows by expert, stably.
///   expert_ids     [T, topk] int32 or int64, any row stride. Ids outside [0, E) (for instance -1,
///                  "not on this rank") fall to the end, outside every segment
///   m_sizes        [E] int32 or int64, written: rows of each expert
///   gather_indices [M] same dtype as m_sizes, written: flat index of the row at position r
///   inverse        [M] same dtype, written if given: position of flat row i
///   workspace      CUDA only: route_workspace_bytes() bytes on the device, any contents
MOEGEMM_API void route(const TensorView& expert_ids, std::int64_t num_experts,
                       const TensorView& m_sizes, const TensorView& gather_indices,
                       const TensorView& inverse = {}, void* workspace = nullptr,
                       const ExecutionContext& context = {});

/// Bytes of device memory that `route` needs for this many rows and experts; 0 on the CPU.
MOEGEMM_API std::int64_t route_workspace_bytes(std::int64_t rows, std::int64_t num_experts,
                                               Device device);

/// out[t] = sum over s of weights[t * topk + s] * rows[t * topk + s], in fp32, s ascending, rounded
/// once.  rows [M, C] in flat order; weights [M] or [T, topk], fp32 or rows' dtype, or not given (a
/// plain sum); out [T, C] in rows' dtype or fp32.
MOEGEMM_API void combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                         const TensorView& out, const ExecutionContext& context = {});

/// One pass over the rows that serves the backward of `multiply`, with g = gather_indices[r]:
///   dot[g]     = <product[r], x[r]>       fp32 sum, rounded once to dot's dtype
///   scaled[r]  = router_weights[g] * product[r]
///   scaled_x[r] = router_weights[g] * x[r]  when given
/// product, scaled [M, K] (may be the same memory); x, scaled_x [M, K]; dot [M]. Rows past
/// sum(m_sizes) are zero in scaled and scaled_x; flat slots that no row names are zero in dot.
MOEGEMM_API void scale_rows(const TensorView& product, const TensorView& x,
                            const RoutingView& routing, const TensorView& scaled,
                            const TensorView& dot, const TensorView& scaled_x = {},
                            const ExecutionContext& context = {});

}  // namespace moegemm
