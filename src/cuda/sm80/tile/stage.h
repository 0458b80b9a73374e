#pragma once

#include "cuda/device/host_device.h"
#include "cuda/device/swizzle.h"
#include "cuda/sm80/tile/traits.h"

/// Where the elements of an operand lie in a stage of shared memory, and which of them each lane of
/// a warp reads. Chunks of 16 bytes are swizzled so that a warp's reads spread over all banks; the
/// XOR touches bits that no multiple of a block reaches, so that a lane needs one offset, and
/// everything else is a constant to add or to XOR.
namespace moegemm::cuda::sm80 {

/// Contraction contiguous: outer index times DepthBytes. Rows of 64 bytes share a 128-byte line of
/// banks in pairs.
template <int DepthBytes>
MOEGEMM_HOST_DEVICE constexpr int depth_major_offset(int outer, int chunk) {
  if constexpr (DepthBytes == 128) return swizzle_128b(outer, chunk);
  return outer * DepthBytes + ((chunk ^ (outer >> 1 & 3)) << 4);
}

/// Outer direction contiguous: depth index times OuterBytes. ldmatrix reads one chunk of eight
/// depths (16-bit elements); 32-bit elements are read one by one, four depths of two chunks.
template <int OuterBytes, int ElementBytes>
MOEGEMM_HOST_DEVICE constexpr int outer_major_offset(int depth, int chunk) {
  const int swizzle = ElementBytes == 2 ? depth & 7 : (depth & 3) << 1;
  return depth * OuterBytes + ((chunk ^ swizzle) << 4);
}

/// A thread that copies a chunk of every Step-th row starting at row r < Step, the first to offset
/// `first` = depth_major_offset(r, chunk): the offset of pass i. Step is a power of two, so that r
/// and i * Step have no bit of the swizzle in common.
template <int DepthBytes, int Step>
MOEGEMM_HOST_DEVICE constexpr int depth_major_pass(int first, int i) {
  return (first ^ depth_major_offset<DepthBytes>(i * Step, 0) % DepthBytes) + i * Step * DepthBytes;
}
template <int OuterBytes, int ElementBytes, int Step>
MOEGEMM_HOST_DEVICE constexpr int outer_major_pass(int first, int i) {
  return (first ^ outer_major_offset<OuterBytes, ElementBytes>(i * Step, 0) % OuterBytes) +
         i * Step * OuterBytes;
}

/// A stage may hold the columns of B in another order: place p of 32 has column placed_column(p).
/// mma.sync leaves two neighbouring places of each block of eight in a lane; in this order those of
/// four blocks are eight neighbouring columns, 16 bytes of a row, which nobody has to trade with
/// other lanes. Bits change places: placed_column(a + b) is the sum of both if a and b have no bit
/// in common.
MOEGEMM_HOST_DEVICE constexpr int placed_column(int place) {
  return (place & ~30) + (place >> 1 & 3) * 8 + (place >> 3 & 3) * 2;
}

/// ldmatrix.x4 of 16 outer by 32 bytes of depth: the row that lane `lane` names, relative to the
/// block, for A (matrices: low rows, high rows, then the second 16 bytes) ...
template <int DepthBytes>
MOEGEMM_HOST_DEVICE constexpr int a_depth_lane(int lane) {
  return depth_major_offset<DepthBytes>(lane % 16, lane / 16);
}
/// ... and for B (matrices: both depths of the low columns, then of the high ones).
template <int DepthBytes>
MOEGEMM_HOST_DEVICE constexpr int b_depth_lane(int lane) {
  return depth_major_offset<DepthBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
/// Add this for the block of 16 that starts at outer index `outer` ...
template <int DepthBytes>
MOEGEMM_HOST_DEVICE constexpr int depth_block(int outer) {
  return outer * DepthBytes;
}
/// ... and XOR this for 32-byte step `step`.
MOEGEMM_HOST_DEVICE constexpr int depth_step(int step) { return step << 5; }

/// ldmatrix.x4.trans of 16 depths by 16 outer 16-bit elements, for A (matrices: low and high outer
/// of the low depths, then of the high ones); `chunk` is the warp's first.
template <int OuterBytes>
MOEGEMM_HOST_DEVICE constexpr int a_outer_lane(int lane, int chunk) {
  return outer_major_offset<OuterBytes, 2>(lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
}
/// For B: low and high depths of the low outer, then of the high ones.
template <int OuterBytes>
MOEGEMM_HOST_DEVICE constexpr int b_outer_lane(int lane, int chunk) {
  return outer_major_offset<OuterBytes, 2>(lane % 8 + lane / 8 % 2 * 8, chunk + lane / 16);
}
/// XOR this for block `block` of 16 outer elements of the warp.
MOEGEMM_HOST_DEVICE constexpr int outer_block(int block) { return block << 5; }

/// 32-bit elements, outer major: the word at depth t, outer g of an 8-wide block. XOR
/// outer_block(b) for the b-th such block, add 4 * OuterBytes for depth t + 4.
template <int OuterBytes>
MOEGEMM_HOST_DEVICE constexpr int word_outer_lane(int lane, int chunk) {
  const int g = lane / 4;
  return outer_major_offset<OuterBytes, 4>(lane % 4, chunk + g / 4) + g % 4 * 4;
}

}  // namespace moegemm::cuda::sm80
