#pragma once

#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/passes/elements.cuh"
#include "moegemm/kinds.h"

/// What a launch of copy_factors is told: see core/factor_tiles.h for lines and columns.
namespace moegemm::cuda {

constexpr int kCopyThreads = 256;
constexpr int kMostCopies = 8;  ///< of a launch: their descriptions are kernel arguments
constexpr int kTile = 64;       ///< lines and columns of a general tile
/// Elements of a vector tile. 128 bytes of a thread are in flight with fp32, 64 with 16 bits.
constexpr int kTurnLog = 13;

enum class CopyWay : std::uint8_t {
  kRun,          ///< memory runs along the columns in both
  kTurn,         ///< it does not: general tiles, element by element where vectors do not fit
  kTurnVectors,  ///< tiles of 2^kTurnLog elements, 16 bytes at a time on both ways
};

struct CopySide {
  FastDivisor divisor;  ///< inner
  int inner;
  int extent;  ///< inner * outer
  int given_inner;
  int given_outer;
  std::int64_t from_inner, from_outer, to_inner, to_outer;
  bool inner_is_expert, outer_is_expert;
};

struct CopyParams {
  const void* from;
  void* to;
  DType from_dtype, to_dtype;
  float scaling;
  CopyWay way;
  bool vectors;             ///< eight elements at a time (kRun), or two (kTurn, reading)
  bool to_vectors;          ///< two at a time (kTurn, writing)
  std::int8_t log_columns;  ///< of a vector tile
  int across;               ///< tiles, or vectors of a run, of a line
  FastDivisor across_divisor;
  int units;  ///< of all lines
  int first_block;
  CopySide columns, lines;
};

struct CopyArguments {
  CopyParams copies[kMostCopies];
  int count;
  IndexArray sizes;
};

/// Where one line or column is.
struct Place {
  std::int64_t from;
  std::int64_t to;
  bool given;  ///< else zeros
  bool used;   ///< its expert has rows, or is the other side's
};

__device__ __forceinline__ Place place(const CopySide& side, int at, const IndexArray& sizes) {
  const int outer = static_cast<int>(side.divisor.divide(static_cast<unsigned>(at)));
  const int inner = at - outer * side.inner;
  Place found = {outer * side.from_outer + inner * side.from_inner,
                 outer * side.to_outer + inner * side.to_inner,
                 inner < side.given_inner && outer < side.given_outer, true};
  if (sizes.data && (side.inner_is_expert || side.outer_is_expert)) {
    found.used = load_index(sizes.data, sizes.is_64_bit, side.inner_is_expert ? inner : outer) > 0;
  }
  return found;
}

}  // namespace moegemm::cuda
