#pragma once

#include "cuda/sm80/tile/stage.h"

/// How packed weights pass through a stage. A piece is 16 packed bytes: weights of one row of W
/// that share a scale. The thread that copies a piece decodes it, in place: the stage has room for
/// the decoded weights, `kChunks` chunks of 16 bytes, and the packed bytes wait in the first of
/// them, the word of memory with their scale in the second. So nobody waits for another thread, and
/// once a stage is decoded it is a stage of plain weights.
namespace moegemm::cuda::sm80 {

template <typename Traits, int Bits>
struct Pieces {
  using Shape = typename Traits::Shape;
  static constexpr bool kDepthMajor = Traits::kBMajor == Major::kDepth;
  static constexpr int kWeights = kChunkBytes * 8 / Bits;  ///< of a piece
  static constexpr int kChunks = kWeights / Traits::kChunkElements;
  static constexpr int kRows = kDepthMajor ? Shape::kCols : Traits::kDepth;  ///< of W in a stage
  static constexpr int kColumns = kDepthMajor ? Traits::kDepth : Shape::kCols;
  static constexpr int kRowPieces = kColumns / kWeights;
  static constexpr int kRowsAtOnce = Shape::kCopyThreads / kRowPieces;
  static constexpr int kPasses = kRows / kRowsAtOnce;
  /// Eight threads take pieces of so many columns, in as many rows as that leaves: their chunks are
  /// in different banks, whichever of a piece they touch.
  static constexpr int kSideBySide = kRowPieces < 8 / kChunks ? kRowPieces : 8 / kChunks;
  static constexpr int kGroups = kRowPieces / kSideBySide;  ///< of eight threads, along a row
  static_assert(kRowPieces >= 1 && kPasses >= 1 && kRows % kRowsAtOnce == 0);
  static_assert(kRowsAtOnce % 8 == 0, "passes do not change the swizzle");

  /// Of the pieces of a row, and of the rows of a pass, those of thread `thread`.
  static MOEGEMM_HOST_DEVICE constexpr int piece(int thread) {
    return thread % kSideBySide + thread / 8 % kGroups * kSideBySide;
  }
  static MOEGEMM_HOST_DEVICE constexpr int row(int thread) {
    constexpr int kBelow = 8 / kSideBySide;
    return thread / kSideBySide % kBelow + thread / 8 / kGroups * kBelow;
  }

  /// Where the first chunk of the thread's first piece lies among a stage's weights. XOR chunk(j)
  /// for its j-th, add pass(i) for its i-th piece.
  static MOEGEMM_HOST_DEVICE constexpr int first(int thread) {
    const int chunks = piece(thread) * kChunks;
    if constexpr (kDepthMajor) return depth_major_offset<Shape::kDepthBytes>(row(thread), chunks);
    return outer_major_offset<Traits::kBBytes, Traits::kElementBytes>(row(thread), chunks);
  }
  static MOEGEMM_HOST_DEVICE constexpr int chunk(int j) { return j * kChunkBytes; }
  static MOEGEMM_HOST_DEVICE constexpr int pass(int i) {
    return i * kRowsAtOnce * kColumns * Traits::kElementBytes;
  }
  /// Add this to the second chunk for the word with the scale: a warp's are in different banks.
  static MOEGEMM_HOST_DEVICE constexpr int scale_word(int thread) { return thread / 8 % 4 * 4; }
};

}  // namespace moegemm::cuda::sm80
