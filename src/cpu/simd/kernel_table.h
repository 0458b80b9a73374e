#pragma once

#include <array>
#include <cstdint>
#include <iterator>

#include "moegemm/quantization.h"
#include "moegemm/tensor.h"

/// What the instruction-set files offer to the rest of the backend: plain functions over plain
/// structs. Those files are compiled for wider machines than the one this library may run on, so
/// nothing inline crosses this border in either direction: the linker could keep the wide copy of a
/// shared inline function for everybody.
namespace moegemm::cpu::simd {

/// Where the rows of a task go. Columns [first_col, first_col + columns of the task) are written.
struct OutputRows {
  void* const* rows = nullptr;            ///< [rows] start of each output row; null: not stored
  const float* router_weights = nullptr;  ///< [rows] the fp32 result times these; null: none
  std::int64_t first_col = 0;
  DType dtype = DType::kFloat32;
  const float* bias = nullptr;  ///< [columns of the task] added before the factor, readable up to a
                                ///< whole vector; null: none
};

/// More of a task's contraction, after its own: rows and weights of their own, which lie as the
/// task's do.
struct LowRankPart {
  const void* const* rows = nullptr;  ///< [rows of the task] pointers to `rank` elements
  const void* w = nullptr;
  std::int64_t w_stride = 0;
  std::int64_t rank = 0;  ///< 0: none
};

/// A quantised W_e where it lies, in numbers alone: see Quantization.
struct PackedWeights {
  WeightFormat format = WeightFormat::kPlain;
  ScaleType scale_type = ScaleType::kFloat32;
  const std::uint8_t* values = nullptr;  ///< of the expert
  const void* scales = nullptr;          ///< of the expert
  std::int64_t k = 0;
  std::int64_t block_n = 1;
  std::int64_t scale_columns = 0;
  int block_k_shift = 0;      ///< log2 of block_k; of no matter where a row has one scale
  bool flat_blocks = false;   ///< blocks are counted through the matrix, not through each row
  bool byte_lookups = false;  ///< the processor looks bytes up in 128 others (AVX512-VBMI)
  const float* table_values = nullptr;  ///< [16] what nibbles mean
  const void* tables = nullptr;  ///< [256][kTableElems] of the task's dtype, aligned to 64 bytes,
                                 ///< or null. mxfp4: nibbles times each e8m0 scale. int4: for each
                                 ///< low byte of a bf16 scale, products from which the scale's
                                 ///< bits are subtracted, as bits, except from zero
  /// [256][32] of bf16's tables, or null: the low bytes of the sixteen elements, then the high
  /// ones.
  const std::uint8_t* byte_tables = nullptr;
};
/// Sixteen elements, and the same again.
constexpr std::int64_t kTableElems = 32;
/// Columns between the rows of decoded weights of that many columns: one line more, so that rows of
/// 4 KiB do not all fall into one set of the cache.
constexpr std::int64_t decoded_stride(std::int64_t columns) { return (columns + 63) / 32 * 32; }
/// Rows that forward decodes at a time, and the elements that they or their lookup tables take.
constexpr std::int64_t kForwardDecodedRows = 4;
constexpr std::int64_t forward_decoded_elems(std::int64_t k) {
  return kForwardDecodedRows * decoded_stride(k < 128 ? 128 : k);
}
/// Elements of a few rows of X, as floats at most, that stay near while decoded weights pass by.
constexpr std::int64_t kWidenedFloats = 64 * 1024;

/// A block of an expert's weights: rows of W in forward, columns in dX.
struct WeightBlock {
  const void* w =
      nullptr;  ///< its first row; in dX weight row 0 of the expert, at its first column
  std::int64_t w_stride = 0;
  const PackedWeights* packed_w = nullptr;  ///< a quantised W instead of `w`; null: none
  std::int64_t packed_first = 0;            ///< where the block begins in packed_w
  void* decoded = nullptr;                  ///< scratch for what is decoded
};

/// Y[rows, w_rows] = X W^T for some rows of one expert and a block of its weight rows.
/// `decoded` is forward_decoded_elems(k) elements and kWidenedFloats, aligned to 64 bytes.
struct ForwardTask : WeightBlock {
  const void* const* x = nullptr;  ///< [rows] pointers to K elements
  const void* packed_x = nullptr;  ///< what pack_x made of them; null: read them in place
  std::int64_t rows = 0;
  std::int64_t w_rows = 0;
  std::int64_t k = 0;
  LowRankPart low;  ///< its w at the first weight row of the block
  OutputRows out;
  const void* next_w = nullptr;  ///< the block this worker reads next; null: none
  std::int64_t next_w_rows = 0;
  float* parked = nullptr;  ///< scratch: kParkedFloatsPerRow * rows
  float* staged = nullptr;  ///< scratch: kStagedCols * rows
};

/// dX[rows, cols] = dY W for some rows of one expert and a block of its weight columns.
/// `decoded` is kDecodedTerms * decoded_stride(cols) elements; in place kGroupTerms *
/// decoded_stride(kDecodedCols).
struct DxTask : WeightBlock {
  const void* const* dy = nullptr;  ///< [rows] pointers to N elements
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t n = 0;
  LowRankPart low;  ///< its w at the first column of the block
  OutputRows out;
  const void* next_w = nullptr;  ///< the same of the block this worker packs next; null: none
  std::int64_t next_cols = 0;
  std::uint32_t* panels = nullptr;  ///< scratch: packed weights, kFoldSteps * padded cols
  std::uint32_t* words = nullptr;   ///< scratch: copies of dY rows, kDxWordRows * kFoldSteps
  float* totals = nullptr;          ///< scratch: rows * padded cols floats, twice that in place
};

/// Part of dW_e[n_rows, cols] = sum over rows of router weight * dY^T X: one chunk of the segment's
/// rows.
struct DwTask {
  const void* const* dy = nullptr;        ///< [rows] at the first column of the block of N
  const void* const* x = nullptr;         ///< [rows] at the first column of the block of K
  const float* router_weights = nullptr;  ///< [rows] of the contributions; null: none
  std::int64_t rows = 0;                  ///< of this chunk; even unless it is the last
  std::int64_t n_rows = 0;
  std::int64_t dy_cols_after = 0;  ///< columns of dY after the block's that are packed next
  std::int64_t cols = 0;
  bool first = false;   ///< the chunk starts the sums
  bool last = false;    ///< the chunk ends them: write the output
  void* out = nullptr;  ///< element (0, 0) of the block
  std::int64_t out_stride = 0;
  DType out_dtype = DType::kFloat32;
  bool accumulate = false;
  bool x_is_packed = false;            ///< x_panels hold this chunk's X already
  bool stream = false;                 ///< store past the caches where alignment allows
  std::uint32_t* x_panels = nullptr;   ///< scratch: rows * padded cols words
  std::uint32_t* dy_panels = nullptr;  ///< scratch: rows * kDyPanelCols words
  float* totals = nullptr;             ///< scratch, if not (first and last): n_rows * padded cols
};

/// Upper limits over all instruction sets, for the owner of the scratch memory.
constexpr std::int64_t kMaxTileRows = 6;              ///< rows of a forward or dX tile
constexpr std::int64_t kParkedFloatsPerRow = 4 * 16;  ///< 4 accumulators of at most 16 lanes
/// Columns of Y that are collected in fp32 before they are rounded and stored: two lines of bf16.
/// Every row of Y is in a page of its own, which should be opened seldom.
constexpr std::int64_t kStagedCols = 64;
/// Rows of a block from which forward reads X from a packed copy. At least four chunks of them: the
/// tiles then prefetch one weight row each.
constexpr std::int64_t kMinPackedX = 24;
/// The same where the copy spares the tiles from converting numbers.
constexpr std::int64_t kMinWidenedX = 12;
constexpr std::int64_t kMaxLanes = 16;      ///< fp32 lanes of a vector
constexpr std::int64_t kMaxPanelCols = 64;  ///< columns are padded to this in scratch
constexpr std::int64_t kDyPanelCols = 64;   ///< columns of dY packed at a time for dW
/// Most rows of an expert for which dX reads the weights in place: two tiles. Up to 24 measured
/// equal.
constexpr std::int64_t kMaxRowsInPlace = 12;
constexpr std::int64_t kDxWordRows =
    kMaxRowsInPlace > kMaxTileRows ? kMaxRowsInPlace : kMaxTileRows;
/// Steps (terms, or pairs of terms) that a broadcast kernel sums serially before it folds the sum
/// into the total. Every dX kernel folds at the same steps: that makes their bits equal. One fold
/// costs about 1% at 128.
constexpr std::int64_t kFoldSteps = 128;

/// Weight rows of a group that dX reads in place. 8 and 16 stream equally well, 4 a little worse;
/// more rows move the sums less often.
constexpr std::int64_t kGroupTerms = 16;
/// Weight rows that a packed block of dX decodes at a time: 16 KiB of its columns, which stay in
/// L1.
constexpr std::int64_t kDecodedTerms = 32;
/// Columns of a group that dX decodes at a time to read them in place: 8 KiB.
constexpr std::int64_t kDecodedCols = 256;

using ForwardFn = void (*)(const ForwardTask&);
/// Packs `count` rows of k elements into count * (k rounded up to dot_step) elements of
/// packed_x_bytes.
using PackXFn = void (*)(const void* const* rows, std::int64_t count, std::int64_t k, void* packed);
using DxFn = void (*)(const DxTask&);
using DwFn = void (*)(const DwTask&);
/// Rows [row, row + rows) of a quantised W into dense rows of k elements.
using DecodeFn = void (*)(const PackedWeights& w, std::int64_t row, std::int64_t rows, void* out);
/// `count` numbers times `factor`, rounded to elements, denormals too.
using RoundFn = void (*)(const float* from, float factor, std::int64_t count, void* to);

/// The kernels of one instruction set for one input dtype.
struct DTypeKernels {
  DType dtype;
  ForwardFn forward = nullptr;
  PackXFn pack_x = nullptr;
  std::int64_t dot_step = 1;  ///< elements of K that forward multiplies at a time
  std::int64_t packed_x_bytes = 0;
  std::int64_t min_packed_x = kMinPackedX;
  DxFn dx_packed = nullptr;    ///< any number of rows
  DxFn dx_in_place = nullptr;  ///< at most kMaxRowsInPlace rows
  DwFn dw = nullptr;
  DwFn dw_weighted = nullptr;  ///< with router weights: sums of fp32 products
  DecodeFn decode = nullptr;
  RoundFn round = nullptr;
  int terms_per_step = 1;  ///< of all but dw_weighted, which has 1
};

struct KernelTable {
  std::array<DTypeKernels, std::size(kFloatingFormats)> formats;
  int lanes = 0;      ///< fp32 lanes of a vector
  int dot_rows = 0;   ///< forward tile: dot_rows x 4
  int tile_rows = 0;  ///< dX tile: tile_rows x tile_cols
  int tile_cols = 0;
  int outer_rows = 0;  ///< dW tile: outer_rows x outer_cols
  int outer_cols = 0;
};

/// One per instruction-set file; null when the compiler could not build it for this machine type.
const KernelTable* avx512bf16_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx2_kernels();
const KernelTable* portable_kernels();

}  // namespace moegemm::cpu::simd
