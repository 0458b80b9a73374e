#pragma once

#include "cuda/sm90/row_gemm/config.h"
#include "moegemm/kinds.h"

namespace moegemm::cuda::sm90 {

/// How the rows of a tile reach shared memory: which variants of a kernel are compiled.
enum class RowLoads { kInOrder, kGathered, kBoth };

/// The compiled variants of one row GEMM, as kernel function addresses; null if not compiled.
struct RowGemmFunctions {
  const void* in_order = nullptr;
  const void* gathered = nullptr;
  const void* biased = nullptr;  ///< in order, for a bias that `in_order` would not add
};

/// Defined in instance.cuh, instantiated once for each line of instances/sm90_rows.inc and
/// each of bf16 and fp16 in a translation unit of its own.
template <Op O, typename TileT, RowLoads Loads, DType D>
RowGemmFunctions row_gemm_functions();

}  // namespace moegemm::cuda::sm90
