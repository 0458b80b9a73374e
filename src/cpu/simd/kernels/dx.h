#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/broadcast.h"
#include "cpu/simd/kernels/finish.h"
#include "cpu/simd/kernels/pack.h"

/// dX rows = dY rows times W_e: the contraction runs down the weight rows, lanes along K.
///   dx_packed    packs a block of weight columns once, then all rows of the task pass over it
///   dx_in_place  few rows: the weights are read once, straight from memory
/// Both sum in the order of broadcast.h from weight row 0, so their bits are equal.
namespace moegemm::cpu::simd {
namespace {

constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

/// Hands out the weights that are packed next in runs that one tile can prefetch: two lines of
/// kFoldSteps weight rows each.
template <class T>
class WeightPrefetch {
 public:
  /// Nothing if `first` is null.
  WeightPrefetch(const T* first, std::int64_t cols, std::int64_t stride, std::int64_t rows)
      : next_(reinterpret_cast<const char*>(first)),
        stride_bytes_(stride * std::int64_t{sizeof(T)}),
        row_runs_(rows / kFoldSteps),
        runs_(first != nullptr ? row_runs_ * round_up(cols * sizeof(T), 128) / 128 : 0) {}

  PrefetchRun next() {
    if (given_ == runs_) return {};
    const std::int64_t line_pair = given_ / row_runs_;
    const std::int64_t row = given_ % row_runs_ * kFoldSteps;
    ++given_;
    return {next_ + row * stride_bytes_ + line_pair * 128, stride_bytes_};
  }

 private:
  const char* next_;
  std::int64_t stride_bytes_;
  std::int64_t row_runs_;
  std::int64_t runs_;
  std::int64_t given_ = 0;
};

template <class Math, int Rows>
[[gnu::noinline]] void packed_tile(const typename Math::Word* const* rows,
                                   const typename Math::Word* panel, std::int64_t steps,
                                   float* total, std::int64_t total_stride, bool first,
                                   PrefetchRun prefetch) {
  constexpr int kVecs = Math::Isa::kTileVecs;
  WordRows<Math, Rows> a;
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) a.rows[i] = rows[i];
  const PackedSteps<Math, kVecs> b{panel};
  broadcast_fold<Math, Rows, kVecs>(a, b, 0, steps, total, total_stride, first, prefetch);
}

template <class Math, int Rows = Math::Isa::kTileRows>
auto select_packed_tile(std::int64_t rows) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return select_packed_tile<Math, Rows - 1>(rows);
  }
  return packed_tile<Math, Rows>;
}

template <class Math, class T>
void dx_packed(const DxTask& task) {
  using Isa = typename Math::Isa;
  using Word = typename Math::Word;
  static_assert(sizeof(Word) == sizeof(std::uint32_t));
  constexpr std::int64_t kPanelCols = Isa::kTileVecs * Isa::kLanes;
  constexpr std::int64_t kRows = Isa::kTileRows;
  constexpr std::int64_t kTerms = kFoldSteps * Math::kTerms;
  const T* const* dy = reinterpret_cast<const T* const*>(task.dy);
  const T* w = static_cast<const T*>(task.w);
  Word* panels = reinterpret_cast<Word*>(task.panels);
  Word* words = reinterpret_cast<Word*>(task.words);
  const std::int64_t padded_cols = round_up(task.cols, kPanelCols);
  const std::int64_t tiles = (task.rows + kRows - 1) / kRows;

  // Weights are packed fold by fold: what was fetched ahead is used before the caches forget it.
  for (std::int64_t term = 0; term < task.n; term += kTerms) {
    const std::int64_t terms = smaller(kTerms, task.n - term);
    const std::int64_t steps = (terms + Math::kTerms - 1) / Math::kTerms;
    const std::int64_t left = task.n - term - terms;
    pack_panels<Math, T, Isa::kTileVecs>(StridedRows<T>{w + term * task.w_stride, task.w_stride},
                                         terms, task.cols, nullptr, panels);
    WeightPrefetch<T> prefetch(
        left > 0 ? w + (term + terms) * task.w_stride : static_cast<const T*>(task.next_w),
        left > 0 ? task.cols : task.next_cols, task.w_stride,
        smaller(kTerms, left > 0 ? left : task.n));
    // A word that would reach past the row, or that is not the stored number itself, is copied.
    const bool copies = !std::is_same_v<T, typename Math::Stored> || terms % Math::kTerms != 0;
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * task.rows / tiles;
      const std::int64_t rows = (t + 1) * task.rows / tiles - row;
      const Word* a[kRows] = {};
      for (std::int64_t i = 0; i < rows; ++i) {
        if (copies) {
          Math::copy_words(dy[row + i] + term, terms, words + i * kFoldSteps);
          a[i] = words + i * kFoldSteps;
        } else {
          a[i] = reinterpret_cast<const Word*>(dy[row + i] + term);
        }
      }
      const auto tile = select_packed_tile<Math>(rows);
      float* totals = task.totals + row * padded_cols;
      for (std::int64_t c = 0; c < task.cols; c += kPanelCols) {
        tile(a, panels + c * steps, steps, totals + c, padded_cols, term == 0, prefetch.next());
      }
      if (left > 0) continue;
      for (std::int64_t i = 0; i < rows; ++i) {
        if (task.out.rows[row + i] == nullptr) continue;
        finish_row<Isa>(totals + i * padded_cols, task.out.rows[row + i], task.out.dtype,
                        task.out.first_col, task.cols,
                        task.out.scales != nullptr ? task.out.scales + row + i : nullptr);
      }
    }
  }
}

/// A run of weight rows in memory, at most kFoldSteps steps of them.
template <class T>
struct WeightRun {
  const T* w;  // row 0 of the run, first column
  std::int64_t stride;
  std::int64_t terms;  // rows
  std::int64_t valid;  // columns, if the tile is Masked
  const T* next;       // row 0 of the run that follows; null: none
};

/// Fetches the weights of a step that comes `kAhead` steps later, in this run or in the next.
template <class Math, class T, int Vecs>
[[gnu::always_inline]] inline void fetch_weights_ahead(const WeightRun<T>& run, std::int64_t steps,
                                                       std::int64_t step) {
  using Isa = typename Math::Isa;
  constexpr std::int64_t kAhead = 8;
  constexpr std::int64_t kLineElems = 64 / std::int64_t{sizeof(T)};
  const T* ahead = step + kAhead < steps ? run.w + (step + kAhead) * Math::kTerms * run.stride
                   : run.next != nullptr
                       ? run.next + (step + kAhead - steps) * Math::kTerms * run.stride
                       : nullptr;
  if (ahead == nullptr) return;
#pragma GCC unroll 2
  for (std::int64_t t = 0; t < Math::kTerms; ++t) {
#pragma GCC unroll 16
    for (std::int64_t c = 0; c < Vecs * Isa::kLanes; c += kLineElems) {
      Isa::prefetch_l1(ahead + t * run.stride + c);
    }
  }
}

/// total[Rows, Vecs * lanes] (+)= words [Rows, kFoldSteps] times the run.
template <class Math, class T, int Rows, int Vecs, bool Masked>
[[gnu::noinline]] void in_place_tile(const typename Math::Word* words, const WeightRun<T>& run,
                                     float* total, std::int64_t total_stride, bool first) {
  using Isa = typename Math::Isa;
  static_assert(Vecs % 2 == 0);
  typename Isa::Vec acc[Rows][Vecs];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < Vecs; ++j) acc[i][j] = Isa::zero();
  }
  const std::int64_t steps = (run.terms + Math::kTerms - 1) / Math::kTerms;
  for (std::int64_t step = 0; step < steps; ++step) {
    fetch_weights_ahead<Math, T, Vecs>(run, steps, step);
    const std::int64_t term = step * Math::kTerms;
    const T* row = run.w + term * run.stride;
    const T* second = Math::kTerms == 2 && term + 1 < run.terms ? row + run.stride : nullptr;
    typename Math::Step word[Rows];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) word[i] = Math::broadcast(words + i * kFoldSteps + step);
#pragma GCC unroll 8
    for (int j = 0; j < Vecs; j += 2) {
      typename Math::Step b[2];
      Math::template load_in_place<T, Masked>(b, row, second, j * Isa::kLanes, run.valid);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) {
        acc[i][j] = Math::accumulate(acc[i][j], word[i], b[0]);
        acc[i][j + 1] = Math::accumulate(acc[i][j + 1], word[i], b[1]);
      }
    }
  }
  fold<Math, Rows, Vecs>(acc, total, total_stride, first);
}

template <class Math, class T, int Rows>
void dx_in_place_rows(const DxTask& task) {
  using Isa = typename Math::Isa;
  using Word = typename Math::Word;
  constexpr int kVecs = Isa::kInPlaceVecs[Rows - 1];
  constexpr std::int64_t kCols = kVecs * Isa::kLanes;
  constexpr std::int64_t kTerms = kFoldSteps * Math::kTerms;
  const T* const* dy = reinterpret_cast<const T* const*>(task.dy);
  const T* w = static_cast<const T*>(task.w);
  const std::int64_t padded_cols = round_up(task.cols, kCols);

  alignas(64) Word words[Rows][kFoldSteps];
  for (std::int64_t term = 0; term < task.n; term += kTerms) {
    const std::int64_t terms = smaller(kTerms, task.n - term);
    for (int i = 0; i < Rows; ++i) Math::copy_words(dy[i] + term, terms, words[i]);
    for (std::int64_t c = 0; c < task.cols; c += kCols) {
      const T* block = w + term * task.w_stride + c;
      const T* next = c + kCols < task.cols    ? block + kCols
                      : term + terms < task.n  ? w + (term + terms) * task.w_stride
                      : task.next_w != nullptr ? static_cast<const T*>(task.next_w)
                                               : nullptr;
      const WeightRun<T> run{block, task.w_stride, terms, task.cols - c, next};
      (c + kCols <= task.cols ? in_place_tile<Math, T, Rows, kVecs, false>
                              : in_place_tile<Math, T, Rows, kVecs, true>)(words[0], run,
                                                                           task.totals + c,
                                                                           padded_cols, term == 0);
    }
  }
  for (std::int64_t i = 0; i < Rows; ++i) {
    if (task.out.rows[i] == nullptr) continue;
    float* total = task.totals + i * padded_cols;
    for (std::int64_t c = 0; c < task.cols; c += kCols) {
      Math::template restore_column_order<kVecs>(total + c);
    }
    finish_row<Isa>(total, task.out.rows[i], task.out.dtype, task.out.first_col, task.cols,
                    task.out.scales != nullptr ? task.out.scales + i : nullptr);
  }
}

template <class Math, class T>
void dx_in_place(const DxTask& task) {
  static_assert(kMaxRowsInPlace == 4);
  switch (task.rows) {
    case 1:
      return dx_in_place_rows<Math, T, 1>(task);
    case 2:
      return dx_in_place_rows<Math, T, 2>(task);
    case 3:
      return dx_in_place_rows<Math, T, 3>(task);
    default:
      return dx_in_place_rows<Math, T, 4>(task);
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
