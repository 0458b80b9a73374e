#pragma once

#include <cstdint>

#include "moegemm/execution.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// Routing and the top-k sum where rows are a capacity: many ids are those of other ranks' experts
/// and take no row, and nothing of T * topk rows exists. And what surrounds an exchange of rows
/// between ranks.
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

/// What is sent for each token: out[positions[t, s]] = rows[t], to the bit. A position outside
/// [0, R) takes none.  rows [T, C], floating; positions [T, topk] int32 or int64, dense; out [R, C]
/// in rows' dtype. gather_indices [R], as route_compact makes them, or not given: rows of `out`
/// whose index is outside [0, T * topk) become zero. Without them positions must name every row of
/// `out`: a row that they do not is not written.
MOEGEMM_API void spread_rows(const TensorView& rows, const TensorView& positions,
                             const TensorView& gather_indices, const TensorView& out,
                             const ExecutionContext& context = {});

/// For tokens that are sent once to each rank which has an expert of theirs; rank r has those from
/// r * experts_of_rank on.
///   expert_ids     [T, topk] int32 or int64, dense
///   ranks_of_slots [T, topk] int64, dense, written: the rank of each slot's expert; -1 for an id
///                  that names none, and where an earlier slot of the token has the same rank
///   pairs          [ranks] int64, written: slots whose expert is on each rank
MOEGEMM_API void first_slots(const TensorView& expert_ids, std::int64_t experts_of_rank,
                             const TensorView& ranks_of_slots, const TensorView& pairs,
                             const ExecutionContext& context = {});

/// ids [R, topk] int64, written: the experts of the tokens that are sent, as their targets count
/// them, and -1 for those of other ranks. gather_indices [R]: the flat slot that each row is sent
/// for, whose expert's rank is its target; one outside [0, T * topk) has no experts.
MOEGEMM_API void ids_at_target(const TensorView& expert_ids, const TensorView& gather_indices,
                               std::int64_t experts_of_rank, const TensorView& ids,
                               const ExecutionContext& context = {});

/// Rows that came from several ranks, sorted by expert, those of an expert in the order of ranks.
///   counts         [ranks, E] int32 or int64, any row stride: rows of each rank for each expert;
///                  a rank's rows come in the order of experts
///   room           rows that each rank has a place for, filled from the first on; -1: the ranks'
///                  rows follow one another
///   m_sizes        [E] int32 or int64, written: rows of each expert
///   gather_indices [R] same dtype, written: the row at position r, -1 where there is none
///   expert_ids     [R] int64, written: the expert of each row, E for one that no count tells of
/// Negative counts are 0, and rows past the last are left out.
MOEGEMM_API void index_arrivals(const TensorView& counts, std::int64_t room,
                                const TensorView& m_sizes, const TensorView& gather_indices,
                                const TensorView& expert_ids, const ExecutionContext& context = {});

}  // namespace moegemm
