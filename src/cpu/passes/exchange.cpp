#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/passes/rows.h"
#include "cpu/routing_data.h"

namespace moegemm::cpu {

void CpuPasses::spread_rows(const TensorView& rows, const TensorView& positions,
                            const TensorView& gather_indices, const TensorView& out,
                            const ExecutionContext& context) const {
  constexpr std::int64_t kGrainBytes = 64 * 1024;
  const std::int64_t tokens = positions.shape[0], topk = positions.shape[1];
  const std::int64_t element = size_bytes(rows.dtype);
  const std::int64_t bytes = rows.shape[1] * element;
  const auto target = [&](std::int64_t row) {
    return static_cast<std::byte*>(out.data) + row * out.row_stride * element;
  };
  const std::int64_t grain = grain_rows(kGrainBytes, bytes * topk);
  for_each_range(context, tokens, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin * topk; slot < end * topk; ++slot) {
      const std::int64_t row = read_index(positions.data, positions.dtype, slot);
      if (row < 0 || row >= out.shape[0]) continue;
      const auto* source =
          static_cast<const std::byte*>(rows.data) + slot / topk * rows.row_stride * element;
      std::memcpy(target(row), source, static_cast<std::size_t>(bytes));
    }
  });
  if (!gather_indices.given()) return;
  for_each_range(context, out.shape[0], grain_rows(kGrainBytes, bytes),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t row = begin; row < end; ++row) {
                     const std::int64_t slot =
                         read_index(gather_indices.data, gather_indices.dtype, row);
                     if (slot >= 0 && slot < tokens * topk) continue;
                     std::memset(target(row), 0, static_cast<std::size_t>(bytes));
                   }
                 });
}

void CpuPasses::first_slots(const TensorView& expert_ids, std::int64_t experts_of_rank,
                            const TensorView& ranks_of_slots, const TensorView& pairs,
                            const ExecutionContext&) const {
  const std::int64_t topk = expert_ids.shape[1], ranks = pairs.shape[0];
  auto* const found = static_cast<std::int64_t*>(ranks_of_slots.data);
  auto* const counts = static_cast<std::int64_t*>(pairs.data);
  std::fill(counts, counts + ranks, 0);
  std::vector<std::int64_t> seen(ranks, -1);  // the last token that goes to each rank
  for (std::int64_t slot = 0; slot < expert_ids.numel(); ++slot) {
    const std::int64_t id = read_index(expert_ids.data, expert_ids.dtype, slot);
    const std::int64_t rank = id < 0 ? ranks : id / experts_of_rank;
    found[slot] = -1;
    if (rank >= ranks) continue;
    ++counts[rank];
    if (seen[rank] != slot / topk) found[slot] = rank;
    seen[rank] = slot / topk;
  }
}

void CpuPasses::ids_at_target(const TensorView& expert_ids, const TensorView& gather_indices,
                              std::int64_t experts_of_rank, const TensorView& ids,
                              const ExecutionContext&) const {
  const std::int64_t topk = expert_ids.shape[1], slots = expert_ids.numel();
  auto* out = static_cast<std::int64_t*>(ids.data);
  const auto id_of = [&](std::int64_t slot) {
    return read_index(expert_ids.data, expert_ids.dtype, slot);
  };
  for (std::int64_t row = 0; row < gather_indices.shape[0]; ++row, out += topk) {
    const std::int64_t slot = read_index(gather_indices.data, gather_indices.dtype, row);
    std::fill(out, out + topk, -1);
    if (slot < 0 || slot >= slots || id_of(slot) < 0) continue;
    const std::int64_t first = id_of(slot) / experts_of_rank * experts_of_rank;
    for (std::int64_t s = 0; s < topk; ++s) {
      const std::int64_t id = id_of(slot / topk * topk + s);
      if (id >= first && id - first < experts_of_rank) out[s] = id - first;
    }
  }
}

void CpuPasses::index_arrivals(const TensorView& counts, std::int64_t room,
                               const TensorView& m_sizes, const TensorView& gather_indices,
                               const TensorView& expert_ids, const ExecutionContext&) const {
  const std::int64_t ranks = counts.shape[0], experts = counts.shape[1];
  const std::int64_t rows = gather_indices.shape[0];
  auto* const ids = static_cast<std::int64_t*>(expert_ids.data);
  const auto count_of = [&](std::int64_t rank, std::int64_t expert) {
    const std::int64_t count =
        read_index(counts.data, counts.dtype, rank * counts.row_stride + expert);
    return std::clamp<std::int64_t>(count, 0, rows);
  };
  std::fill(ids, ids + rows, experts);
  std::vector<std::int64_t> first(ranks);  // of each rank's rows that are left
  for (std::int64_t rank = 0, next = 0; rank < ranks; ++rank) {
    first[rank] = room < 0 ? next : rank * room;
    for (std::int64_t e = 0; e < experts; ++e) next += count_of(rank, e);
  }
  std::int64_t position = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t begin = std::min(position, rows);
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const std::int64_t count = count_of(rank, e);
      for (std::int64_t i = 0; i < count; ++i, ++position, ++first[rank]) {
        const bool kept = first[rank] < rows && (room < 0 || first[rank] < (rank + 1) * room);
        if (kept) ids[first[rank]] = e;
        if (position < rows) {
          write_index(gather_indices.data, m_sizes.dtype, position, kept ? first[rank] : -1);
        }
      }
    }
    write_index(m_sizes.data, m_sizes.dtype, e, std::min(position, rows) - begin);
  }
  for (; position < rows; ++position) {
    write_index(gather_indices.data, m_sizes.dtype, position, -1);
  }
}

}  // namespace moegemm::cpu
