#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/broadcast.h"
#include "cpu/simd/kernels/finish.h"
#include "cpu/simd/kernels/pack.h"

/// dW_e[n, k] = sum over the segment's rows of dY[r, n] X[r, k]: the contraction runs down the
/// rows, lanes along K. Both operands are packed; X stays in L2 for the whole block, dY passes by
/// in panels, and the output is written row by row.
namespace moegemm::cpu::simd {
namespace {

template <class Math, int Rows, int Vecs>
[[gnu::noinline]] void outer_tile(const typename Math::Word* dy_panel,
                                  const typename Math::Word* x_panel, std::int64_t steps,
                                  float* total, std::int64_t total_stride, bool first) {
  const WordPanel<Math, Rows> a{dy_panel};
  const PackedSteps<Math, Vecs> b{x_panel};
  for (std::int64_t step = 0; step < steps; step += kFoldSteps) {
    const std::int64_t end = step + kFoldSteps < steps ? step + kFoldSteps : steps;
    broadcast_fold<Math, Rows, Vecs>(a, b, step, end, total, total_stride, first, {});
    first = false;
  }
}

template <class Isa>
void finish_weight_row(const DwTask& task, const float* sums, std::int64_t n, std::int64_t col,
                       std::int64_t cols) {
  const std::int64_t at = n * task.out_stride + col;
  if (task.accumulate) {
    accumulate_row<Isa>(sums, static_cast<float*>(task.out) + at, cols);
    return;
  }
  const std::int64_t element_bytes = task.out_dtype == DType::kFloat32 ? 4 : 2;
  void* out = static_cast<char*>(task.out) + at * element_bytes;
  if (task.stream && stream_row<Isa>(sums, out, task.out_dtype, cols)) return;
  finish_row<Isa>(sums, out, task.out_dtype, 0, cols, nullptr, nullptr);
}

template <class Math, class T>
void dw_chunk(const DwTask& task) {
  using Isa = typename Math::Isa;
  using Word = typename Math::Word;
  constexpr std::int64_t kCols = Isa::kOuterVecs * Isa::kLanes;
  constexpr std::int64_t kRows = Isa::kOuterRows;
  static_assert(Isa::kLanes % kRows == 0 && kDyPanelCols % Isa::kLanes == 0);
  const std::int64_t steps = (task.rows + Math::kTerms - 1) / Math::kTerms;
  const std::int64_t padded_cols = (task.cols + kCols - 1) / kCols * kCols;
  const ListedRows<T> x{reinterpret_cast<const T* const*>(task.x), 0};
  Word* x_panels = reinterpret_cast<Word*>(task.x_panels);
  Word* dy_panels = reinterpret_cast<Word*>(task.dy_panels);
  pack_panels<Math, T, Isa::kOuterVecs>(x, task.rows, task.cols, nullptr, x_panels);

  alignas(64) float tile[kRows * kCols];
  const bool whole = task.first && task.last;
  for (std::int64_t n = 0; n < task.n_rows; n += kRows) {
    if (n % kDyPanelCols == 0) {
      const ListedRows<T> dy{reinterpret_cast<const T* const*>(task.dy), n};
      const std::int64_t left = task.n_rows - n;
      pack_panels<Math, T, 1>(dy, task.rows, left < kDyPanelCols ? left : kDyPanelCols, task.scales,
                              dy_panels);
    }
    const std::int64_t in_block = n % kDyPanelCols;
    const Word* dy_panel =
        dy_panels + in_block / Isa::kLanes * steps * Isa::kLanes + in_block % Isa::kLanes;
    const std::int64_t valid = task.n_rows - n < kRows ? task.n_rows - n : kRows;
    for (std::int64_t c = 0; c < task.cols; c += kCols) {
      float* total = whole ? tile : task.totals + n * padded_cols + c;
      const std::int64_t stride = whole ? kCols : padded_cols;
      outer_tile<Math, kRows, Isa::kOuterVecs>(dy_panel, x_panels + c * steps, steps, total, stride,
                                               task.first);
      if (!task.last) continue;
      const std::int64_t cols = task.cols - c < kCols ? task.cols - c : kCols;
      for (std::int64_t i = 0; i < valid; ++i) {
        finish_weight_row<Isa>(task, total + i * stride, n + i, c, cols);
      }
    }
  }
  if (task.stream) Isa::stream_fence();
}

}  // namespace
}  // namespace moegemm::cpu::simd
