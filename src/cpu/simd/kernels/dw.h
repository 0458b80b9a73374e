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

/// Vectors of a step in a dY panel: whole lines of 16-bit rows are interleaved two at a time.
constexpr int kDyVecs = 2;

/// Steps between the folds of broadcast.h: twice as many where a step is two terms, of 16-bit
/// numbers, next to whose own rounding that of the sums does not count. A fold of this tile costs
/// 1% at kFoldSteps.
template <class Math>
constexpr std::int64_t kOuterFoldSteps = Math::kTerms* kFoldSteps;

template <class Math, int Rows, int Vecs>
[[gnu::noinline]] void outer_tile(const typename Math::Word* dy_panel,
                                  const typename Math::Word* x_panel, std::int64_t steps,
                                  float* total, std::int64_t total_stride, bool first) {
  const WordPanel<Math, kDyVecs> a{dy_panel};
  const PackedSteps<Math, Vecs> b{x_panel};
  constexpr std::int64_t kFold = kOuterFoldSteps<Math>;
  for (std::int64_t step = 0; step < steps; step += kFold) {
    const std::int64_t end = step + kFold < steps ? step + kFold : steps;
    broadcast_fold<Math, Rows, Vecs>(a, b, step, end, total, total_stride, first, {});
    first = false;
  }
}

/// Rounds `rows` x `cols` sums into the output at (n, col).
template <class Isa, class Out>
void finish_weight_tile_as(const DwTask& task, const float* sums, std::int64_t stride,
                           std::int64_t n, std::int64_t rows, std::int64_t col, std::int64_t cols) {
  Out* out = static_cast<Out*>(task.out) + n * task.out_stride + col;
  for (std::int64_t i = 0; i < rows; ++i, sums += stride, out += task.out_stride) {
    if constexpr (Isa::kStreams) {
      if (task.stream && stream_row_as<Isa>(sums, out, cols)) continue;
    }
    finish_row_as<Isa>(sums, out, cols, nullptr, nullptr);
  }
}

/// The same where the sums go: to fp32 or to T, the type of the operands.
template <class Isa, class T>
void finish_weight_tile(const DwTask& task, const float* sums, std::int64_t stride, std::int64_t n,
                        std::int64_t rows, std::int64_t col, std::int64_t cols) {
  if (task.accumulate) {
    float* out = static_cast<float*>(task.out) + n * task.out_stride + col;
    for (std::int64_t i = 0; i < rows; ++i) {
      accumulate_row<Isa>(sums + i * stride, out + i * task.out_stride, cols);
    }
    return;
  }
  // The rules admit no other output.
  if (task.out_dtype == DType::kFloat32) {
    finish_weight_tile_as<Isa, float>(task, sums, stride, n, rows, col, cols);
  } else {
    finish_weight_tile_as<Isa, T>(task, sums, stride, n, rows, col, cols);
  }
}

/// Brings the columns of dY that are packed next, a few rows per tile: those of the next panel, or
/// after the last panel those of the next block. 16-bit rows into L1, from where they fall to L2
/// before they are wanted: prefetches into L2 alone left half of their misses. The longer rows of
/// fp32 would push the operands of the tiles out of L1.
template <class Math, class T>
class DyPrefetch {
 public:
  /// `tiles`: how many tiles there are until the next columns are packed.
  DyPrefetch(const DwTask& task, std::int64_t first_col, std::int64_t tiles)
      : rows_(reinterpret_cast<const T* const*>(task.dy)),
        col_(first_col),
        cols_(panel_cols(task.n_rows + task.dy_cols_after - first_col)),
        left_(cols_ > 0 ? task.rows : 0),
        share_((task.rows + tiles - 1) / tiles) {}

  void fetch() {
    for (std::int64_t i = 0; i < share_ && left_ > 0; ++i, --left_, ++rows_) {
      const char* row = reinterpret_cast<const char*>(*rows_ + col_);
      for (std::int64_t at = 0; at < cols_ * std::int64_t{sizeof(T)}; at += 64) {
        if constexpr (sizeof(T) == 2) {
          Math::Isa::prefetch_l1(row + at);
        } else {
          Math::Isa::prefetch_l2(row + at);
        }
      }
    }
  }

 private:
  static std::int64_t panel_cols(std::int64_t left) {
    return left < kDyPanelCols ? left : kDyPanelCols;
  }

  const T* const* rows_;
  std::int64_t col_;
  std::int64_t cols_;
  std::int64_t left_;
  std::int64_t share_;
};

template <class Math, class T>
void dw_chunk(const DwTask& task) {
  using Isa = typename Math::Isa;
  using Word = typename Math::Word;
  constexpr std::int64_t kCols = Isa::kOuterVecs * Isa::kLanes;
  constexpr std::int64_t kRows = Isa::kOuterRows;
  constexpr std::int64_t kDyCols = kDyVecs * Isa::kLanes;
  static_assert(kDyCols % kRows == 0 && kDyPanelCols % kDyCols == 0);
  const std::int64_t steps = (task.rows + Math::kTerms - 1) / Math::kTerms;
  const std::int64_t padded_cols = (task.cols + kCols - 1) / kCols * kCols;
  const ListedRows<T> x{reinterpret_cast<const T* const*>(task.x), 0};
  Word* x_panels = reinterpret_cast<Word*>(task.x_panels);
  Word* dy_panels = reinterpret_cast<Word*>(task.dy_panels);
  if (!task.x_is_packed) {
    pack_panels<Math, T, Isa::kOuterVecs>(x, task.rows, task.cols, nullptr, x_panels, steps);
  }

  alignas(64) float tile[kRows * kCols];
  const bool whole = task.first && task.last;
  for (std::int64_t panel = 0; panel < task.n_rows; panel += kDyPanelCols) {
    const ListedRows<T> dy{reinterpret_cast<const T* const*>(task.dy), panel};
    const std::int64_t left = task.n_rows - panel;
    const std::int64_t panel_rows = left < kDyPanelCols ? left : kDyPanelCols;
    pack_panels<Math, T, kDyVecs>(dy, task.rows, panel_rows, task.router_weights, dy_panels, steps);
    DyPrefetch<Math, T> next_columns(task, panel + kDyPanelCols,
                                     (panel_rows + kRows - 1) / kRows * (padded_cols / kCols));
    for (std::int64_t in_panel = 0; in_panel < panel_rows; in_panel += kRows) {
      const std::int64_t n = panel + in_panel;
      const Word* dy_panel = dy_panels + in_panel / kDyCols * steps * kDyCols + in_panel % kDyCols;
      const std::int64_t valid = panel_rows - in_panel < kRows ? panel_rows - in_panel : kRows;
      for (std::int64_t c = 0; c < task.cols; c += kCols) {
        float* total = whole ? tile : task.totals + n * padded_cols + c;
        const std::int64_t stride = whole ? kCols : padded_cols;
        next_columns.fetch();
        outer_tile<Math, kRows, Isa::kOuterVecs>(dy_panel, x_panels + c * steps, steps, total,
                                                 stride, task.first);
        if (!task.last) continue;
        const std::int64_t cols = task.cols - c < kCols ? task.cols - c : kCols;
        finish_weight_tile<Isa, T>(task, total, stride, n, valid, c, cols);
      }
    }
  }
  if (task.stream) Isa::stream_fence();
}

}  // namespace
}  // namespace moegemm::cpu::simd
