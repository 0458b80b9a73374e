#pragma once

#include "cuda/device/swizzle.h"
#include "cuda/device/warp.h"
#include "cuda/sm90/row_gemm/traits.h"

/// Which features a thread has in a TF32 tile: four neighbours, so that it reads them from a row of
/// W, and stores them to a row of the output, as 16 bytes. Feature q of them is row lane / 4 + 8 *
/// (q / 2) of the warp's part of block q % 2.
namespace moegemm::cuda::sm90 {

constexpr int kOwnFeatures = 4;
/// A warp's 16 rows of both blocks.
constexpr int kWarpFeatures = 32;

/// dX: which quad of a warp's 32 features a lane has. Eight lanes read two quads in four rows at a
/// time: those must be four apart to lie in different banks.
__device__ __forceinline__ int own_quad(int lane) { return lane / 8 | lane / 4 % 2 * 4; }

}  // namespace moegemm::cuda::sm90
