#include <algorithm>
#include <vector>

#include "core/dropped_row.h"
#include "core/process/environment.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/validation/route_rules.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/passes.h"

namespace moegemm {
namespace {

/// One integer on the device, which a caller may leave out.
void require_scalar(const Argument& scalar, const Argument& lead) {
  if (!scalar.view.given()) return;
  require_form(scalar, {{1, "[1]"}});
  require_index(scalar);
  require_same_device(scalar, lead);
  require_shape(scalar, {1}, "[1]");
}

/// [T, topk] without gaps between its rows.
void require_positions(const Argument& positions, std::int64_t tokens, std::int64_t topk) {
  require_form(positions, {{2, "[T, topk]"}});
  require_index(positions);
  require_shape(positions, {tokens, topk}, "[T, topk]");
  if (tokens > 1 && positions.view.row_stride != topk) {
    refuse_value("positions has rows ", positions.view.row_stride,
                 " elements apart; they must be dense, topk = ", topk, " apart");
  }
}

/// Rows, and where those of `tokens` tokens are among them or go; returns topk.
std::int64_t require_rows_at(const Argument& rows, const char* letters, const Argument& positions,
                             std::int64_t tokens) {
  require_form(rows, {{2, letters}});
  require_floating(rows);
  require_form(positions, {{2, "[T, topk]"}});
  const std::int64_t topk = positions.view.shape[1];
  require_topk(topk);
  require_positions(positions, tokens, topk);
  require_same_device(positions, rows);
  return topk;
}

void require_int64(const Argument& argument) {
  if (argument.view.dtype == DType::kInt64) return;
  refuse_type(argument.name, " has dtype ", to_string(argument.view.dtype), "; it must be int64");
}

/// [T, topk] ids without gaps between their rows, of ranks that have so many experts; returns T.
std::int64_t require_dense_ids(const Argument& expert_ids, std::int64_t experts_of_rank) {
  require_form(expert_ids, {{2, "[T, topk]"}});
  require_index(expert_ids);
  require_topk(expert_ids.view.shape[1]);
  require_dense(expert_ids);
  if (experts_of_rank < 1) {
    refuse_value("experts_of_rank is ", experts_of_rank, "; it must be at least 1");
  }
  return expert_ids.view.shape[0];
}

void refuse_dropped(const DroppedRow& row, std::int64_t capacity) {
  refuse_value("max_rows, the length of gather_indices, is ", capacity, ", but ", row.routed,
               " rows have an expert; the first without a place is slot ", row.slot, " of token ",
               row.token, " for expert ", row.expert);
}

}  // namespace

std::optional<DroppedRow> find_dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                           std::int64_t tokens, std::int64_t capacity) {
  const std::int64_t topk = expert_ids.shape[1];
  const auto id_at = [&](std::int64_t t, std::int64_t s) -> std::int64_t {
    const std::int64_t at = t * expert_ids.row_stride + s;
    return expert_ids.dtype == DType::kInt32
               ? static_cast<const std::int32_t*>(expert_ids.data)[at]
               : static_cast<const std::int64_t*>(expert_ids.data)[at];
  };
  std::vector<std::int64_t> sizes(experts, 0);
  DroppedRow dropped;
  for (std::int64_t i = 0; i < tokens * topk; ++i) {
    const std::int64_t id = id_at(i / topk, i % topk);
    if (id < 0 || id >= experts) continue;
    ++sizes[id];
    ++dropped.routed;
  }
  if (dropped.routed <= capacity) return std::nullopt;
  std::int64_t before = 0;
  while (before + sizes[dropped.expert] <= capacity) before += sizes[dropped.expert++];
  std::int64_t kept = capacity - before;  // of that expert
  for (std::int64_t i = 0; i < tokens * topk; ++i) {
    if (id_at(i / topk, i % topk) != dropped.expert || kept-- > 0) continue;
    dropped.token = i / topk;
    dropped.slot = i % topk;
    break;
  }
  return dropped;
}

void route_compact(const TensorView& expert_ids_view, std::int64_t experts,
                   const TensorView& m_sizes_view, const TensorView& gather_indices_view,
                   const TensorView& positions_view, const RouteLimits& limits, void* workspace,
                   const ExecutionContext& context) {
  const Argument expert_ids{"expert_ids", expert_ids_view};
  const Argument m_sizes{"m_sizes", m_sizes_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument positions{"positions", positions_view};
  const Argument num_tokens{"num_tokens", limits.num_tokens};
  const Argument overflow{"overflow", limits.overflow};
  require_routes(expert_ids, experts, m_sizes);
  require_form(gather_indices, {{1, "[R]"}});
  require_positions(positions, expert_ids_view.shape[0], expert_ids_view.shape[1]);
  for (const Argument* output : {&gather_indices, &positions}) {
    require_same_dtype(*output, m_sizes);
    require_same_device(*output, expert_ids);
  }
  require_scalar(num_tokens, expert_ids);
  require_scalar(overflow, expert_ids);
  require_apart({&m_sizes, &gather_indices, &positions, &overflow}, {&expert_ids, &num_tokens});
  const Passes& passes = require_workspace(workspace, expert_ids_view, experts);
  if (limits.check || environment_of_call().check()) {
    const std::int64_t capacity = gather_indices_view.shape[0];
    const auto dropped =
        passes.dropped_row(expert_ids_view, experts, limits.num_tokens, capacity, context);
    if (dropped) refuse_dropped(*dropped, capacity);
  }
  passes.route_compact(expert_ids_view, experts, m_sizes_view, gather_indices_view, positions_view,
                       limits, workspace, context);
}

void combine_rows(const TensorView& rows_view, const TensorView& weights_view,
                  const TensorView& positions_view, const TensorView& out_view,
                  const ExecutionContext& context) {
  const Argument rows{"rows", rows_view};
  const Argument weights{"weights", weights_view};
  const Argument positions{"positions", positions_view};
  const Argument out{"out", out_view};
  const std::int64_t tokens = positions_view.shape[0];
  const std::int64_t topk = require_rows_at(rows, "[R, C]", positions, tokens);
  if (weights_view.given()) {
    require_router_weights(weights, rows, checked_product(tokens, topk, "T * topk"), topk);
  }
  require_like_or_float32(out, rows, {tokens, rows_view.shape[1]}, "[T, C]");
  require_apart({&out}, {&rows, &weights, &positions});
  require_dense(weights);
  passes_for(rows_view.device)
      .combine(rows_view, weights_view, positions_view, topk, out_view, context);
}

void spread_rows(const TensorView& rows_view, const TensorView& positions_view,
                 const TensorView& gather_indices_view, const TensorView& out_view,
                 const ExecutionContext& context) {
  const Argument rows{"rows", rows_view};
  const Argument positions{"positions", positions_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument out{"out", out_view};
  require_rows_at(rows, "[T, C]", positions, rows_view.shape[0]);
  require_form(out, {{2, "[R, C]"}});
  require_like(out, rows, {out_view.shape[0], rows_view.shape[1]}, "[R, C]");
  if (gather_indices_view.given()) {
    require_form(gather_indices, {{1, "[R]"}});
    require_index(gather_indices);
    require_shape(gather_indices, {out_view.shape[0]}, "[R]");
    require_same_device(gather_indices, rows);
  }
  require_apart({&out}, {&rows, &positions, &gather_indices});
  passes_for(rows_view.device)
      .spread_rows(rows_view, positions_view, gather_indices_view, out_view, context);
}

void first_slots(const TensorView& expert_ids_view, std::int64_t experts_of_rank,
                 const TensorView& ranks_of_slots_view, const TensorView& pairs_view,
                 const ExecutionContext& context) {
  const Argument expert_ids{"expert_ids", expert_ids_view};
  const Argument ranks_of_slots{"ranks_of_slots", ranks_of_slots_view};
  const Argument pairs{"pairs", pairs_view};
  const std::int64_t tokens = require_dense_ids(expert_ids, experts_of_rank);
  require_positions(ranks_of_slots, tokens, expert_ids_view.shape[1]);
  require_form(pairs, {{1, "[ranks]"}});
  require_extent(pairs, pairs_view.shape[0], "ranks");
  for (const Argument* output : {&ranks_of_slots, &pairs}) {
    require_int64(*output);
    require_same_device(*output, expert_ids);
  }
  require_apart({&ranks_of_slots, &pairs}, {&expert_ids});
  passes_for(expert_ids_view.device)
      .first_slots(expert_ids_view, experts_of_rank, ranks_of_slots_view, pairs_view, context);
}

void ids_at_target(const TensorView& expert_ids_view, const TensorView& gather_indices_view,
                   std::int64_t experts_of_rank, const TensorView& ids_view,
                   const ExecutionContext& context) {
  const Argument expert_ids{"expert_ids", expert_ids_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument ids{"ids", ids_view};
  require_dense_ids(expert_ids, experts_of_rank);
  require_form(gather_indices, {{1, "[R]"}});
  require_index(gather_indices);
  require_same_device(gather_indices, expert_ids);
  require_form(ids, {{2, "[R, topk]"}});
  require_shape(ids, {gather_indices_view.shape[0], expert_ids_view.shape[1]}, "[R, topk]");
  require_int64(ids);
  require_same_device(ids, expert_ids);
  require_dense(ids);
  require_apart({&ids}, {&expert_ids, &gather_indices});
  passes_for(expert_ids_view.device)
      .ids_at_target(expert_ids_view, gather_indices_view, experts_of_rank, ids_view, context);
}

void index_arrivals(const TensorView& counts_view, std::int64_t room,
                    const TensorView& m_sizes_view, const TensorView& gather_indices_view,
                    const TensorView& expert_ids_view, const ExecutionContext& context) {
  const Argument counts{"counts", counts_view};
  const Argument m_sizes{"m_sizes", m_sizes_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument expert_ids{"expert_ids", expert_ids_view};
  require_form(counts, {{2, "[ranks, E]"}});
  require_index(counts);
  const std::int64_t ranks = counts_view.shape[0], experts = counts_view.shape[1];
  require_extent(counts, ranks, "ranks");
  require_extent(counts, experts, "E");
  if (room < -1) refuse_value("room is ", room, "; it must be -1 or not negative");
  if (std::max(ranks, experts) >= std::int64_t{1} << 24) {
    refuse_value("counts is [", ranks, ", ", experts, "]; ranks and E must be below 2^24");
  }
  require_form(m_sizes, {{1, "[E]"}});
  require_index(m_sizes);
  require_shape(m_sizes, {experts}, "[E]");
  require_form(gather_indices, {{1, "[R]"}});
  const std::int64_t rows = gather_indices_view.shape[0];
  // More places than there are rows: any number leaves as much to the first rank, and nothing to
  // others.
  const std::int64_t places = std::min(room, rows);
  if (room >= 0 && checked_product(ranks, places, "ranks * R") < rows) {
    refuse_value("room is ", room, " for each of ", ranks,
                 " ranks; together they must have room for R = ", rows, " rows");
  }
  require_same_dtype(gather_indices, m_sizes);
  require_form(expert_ids, {{1, "[R]"}});
  require_shape(expert_ids, {rows}, "[R]");
  require_int64(expert_ids);
  for (const Argument* output : {&m_sizes, &gather_indices, &expert_ids}) {
    require_same_device(*output, counts);
  }
  require_apart({&m_sizes, &gather_indices, &expert_ids}, {&counts});
  passes_for(counts_view.device)
      .index_arrivals(counts_view, places, m_sizes_view, gather_indices_view, expert_ids_view,
                      context);
}

}  // namespace moegemm
