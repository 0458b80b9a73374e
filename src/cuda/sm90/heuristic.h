#pragma once

#include <span>

#include "cuda/backend/kernel_entry.h"

namespace moegemm::cuda::sm90 {

/// The rank of a feasible kernel for a problem of many waves: less is better, equal ranks go by
/// list order. Host facts only.
int preference_rank(const KernelInfo& kernel, const Problem& problem);

/// Whether the activated kernel with this tile is faster than the best plain one with a pass after
/// it. Both give the same bits, so that the choice may depend on the batch.
bool fusing_is_faster(const Problem& problem, const TileShape& tile);

/// Whether dW is faster after a copy of the gathered operand in order.
bool gathering_first_is_faster(const Problem& problem);

/// Whether a pass that decodes W and a plain product are faster than a kernel that decodes W
/// itself, and take no more than 4 GiB where W cannot be cut. Both give the same bits.
bool dequantising_first_is_faster(const Problem& problem);

/// Whether L2 should rather keep the gathered rows of a forward product than its weights: where
/// each expert has one tile of rows, nobody reads a weight panel again.
bool weights_pass_through_l2(const Problem& problem, const TileShape& tile, std::int64_t l2_bytes);

/// The position of the kernel with narrow tiles, where they divide a product of few rows among the
/// multiprocessors clearly better than tiles of 128 features; else -1.
int choose_narrow(std::span<const KernelEntry* const> feasible, const Problem& problem,
                  const DeviceFacts& facts);

/// The position of the kernel that should be fastest among those that can run the problem: the one
/// of the best rank, unless its tiles fit the problem clearly worse than another one's.
int choose_among(std::span<const KernelEntry* const> feasible, const Problem& problem,
                 const DeviceFacts& facts);

}  // namespace moegemm::cuda::sm90
