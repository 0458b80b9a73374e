#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "moegemm/execution.h"
#include "moegemm/kinds.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// The factors of low-rank parts (GemmOptions::low_rank_weights), which their owners keep in other
/// layouts and formats than the products read: PEFT has B as [N, r, E] in fp32.
namespace moegemm {

/// A stack [E, rows, columns] that somebody else owns, with any strides, in elements.
struct StridedStack {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<std::int64_t, 3> shape = {};
  std::array<std::int64_t, 3> strides = {};
  Device device;
};

/// to[e, i, j] = scaling * from[e, i, j] in fp32, rounded once. `to` has as many experts and at
/// least as many rows and columns; what it has more is zero.
struct FactorCopy {
  StridedStack from;
  StridedStack to;
  float scaling = 1.0f;
};

/// All copies, on a GPU in one launch for every eight. No `to` may be in the memory of another
/// tensor. With m_sizes, [E] int32 or int64, experts of size 0 or less are left out: their part of
/// `to` stays as it is.
MOEGEMM_API void copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes = {},
                              const ExecutionContext& context = {});

/// The thin product of few rows, straight from a factor as its owner keeps it: rows[r] = x[r] A_e^T
/// for the rows r of each expert e, with the bits of a forward whose W is copy_factors of it.
///   x        [T, K] with routing.gather_indices, as permute_x, else [M, K]; bf16 or fp16
///   factor   [E, r, K] in x's dtype or fp32
///   routing  m_sizes, gather_indices and topk; segments follow one another
///   rows     [M, r rounded up to a multiple of 8] in x's dtype; what is in no segment stays as it
///   is
/// On a GPU, with K a multiple of 8, columns side by side and every row aligned to 16 bytes; else
/// it is refused as not implemented.
MOEGEMM_API void factor_rows(const TensorView& x, const StridedStack& factor,
                             const RoutingView& routing, const TensorView& rows,
                             const ExecutionContext& context = {});

}  // namespace moegemm
