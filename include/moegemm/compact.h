#pragma once

#include <cstdint>

#include "moegemm/execution.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// Routing and the top-k sum where rows are a capacity: many ids are those of other ranks' experts
/// and take no row, and nothing of T * topk rows exists.
namespace moegemm {

struct RouteLimits {
  TensorView num_tokens;  ///< [1] int32 or int64, or not given: tokens from that one on take no
                          ///< row, and their ids are not read
  TensorView overflow;    ///< [1] int32 or int64, or not given: becomes 1 if rows were dropped,
                          ///< else it is left alone
  bool check = false;     ///< names the first row that would be dropped: synchronises.
                          ///< MOEGEMM_CHECK=1 in the environment turns it on everywhere
};

/// Sorts by expert, stably, the rows that have one.
///   expert_ids     [T, topk] int32 or int64, any row stride; ids outside [0, E) take no row
///   m_sizes        [E] int32 or int64, written: rows of each expert
///   gather_indices [R] same dtype as m_sizes, R a capacity, written: flat index of the row at
///                  position r, -1 where there is none
///   positions      [T, topk] same dtype, dense, written: position of the row of slot s of token t,
///                  -1 where there is none
///   workspace      CUDA only: route_workspace_bytes(T * topk, E) bytes on the device
/// Of more than R rows those at the last positions are dropped; m_sizes counts what is kept.
MOEGEMM_API void route_compact(const TensorView& expert_ids, std::int64_t experts,
                               const TensorView& m_sizes, const TensorView& gather_indices,
                               const TensorView& positions, const RouteLimits& limits = {},
                               void* workspace = nullptr, const ExecutionContext& context = {});

/// out[t] = sum over s of weights[t, s] * rows[positions[t, s]], in fp32, s ascending, rounded
/// once; a position outside [0, R) adds nothing.  rows [R, C], any order; positions [T, topk] int32
/// or int64, dense; weights [T, topk] or [T * topk], fp32 or rows' dtype, or not given (a plain
/// sum); out [T, C] in rows' dtype or fp32. The bits of `combine` where every slot has a row.
MOEGEMM_API void combine_rows(const TensorView& rows, const TensorView& weights,
                              const TensorView& positions, const TensorView& out,
                              const ExecutionContext& context = {});

}  // namespace moegemm
