#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/broadcast.h"
#include "cpu/simd/kernels/decode.h"
#include "cpu/simd/kernels/dx/spans.h"
#include "cpu/simd/kernels/finish.h"
#include "cpu/simd/kernels/pack.h"

/// dX rows = dY rows times W_e, for experts with many rows: the contraction runs down the weight
/// rows, lanes along K. A block of weight columns is packed once, then all rows of the task pass
/// over it. The sums have the order of broadcast.h from weight row 0.
namespace moegemm::cpu::simd {
namespace {

constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

/// Hands out the weights that are packed next in runs that one tile can prefetch: two lines of
/// kFoldSteps weight rows each. The last tiles before the pack get them, every fourth one: what
/// arrives early is gone again when it is wanted, and what arrives all at once delays the tiles.
template <class T>
class WeightPrefetch {
 public:
  /// Nothing if `first` is null. `tiles`: how often next will be called.
  WeightPrefetch(const T* first, std::int64_t cols, std::int64_t stride, std::int64_t rows,
                 std::int64_t tiles)
      : next_(reinterpret_cast<const char*>(first)),
        stride_bytes_(stride * std::int64_t{sizeof(T)}),
        row_runs_(rows / kFoldSteps),
        runs_(first != nullptr ? row_runs_ * round_up(cols * sizeof(T), 128) / 128 : 0),
        tiles_left_(tiles) {}

  PrefetchRun next() {
    const std::int64_t left = runs_ - given_;
    --tiles_left_;
    if (left == 0 || tiles_left_ >= 4 * left - 3) return {};
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
  std::int64_t tiles_left_;
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

template <class Math, class T>
void dx_packed_span(const DxTask& task, const DxSpan<T>& span) {
  using Isa = typename Math::Isa;
  using Word = typename Math::Word;
  static_assert(sizeof(Word) == sizeof(std::uint32_t));
  constexpr std::int64_t kPanelCols = Isa::kTileVecs * Isa::kLanes;
  constexpr std::int64_t kRows = Isa::kTileRows;
  constexpr std::int64_t kTerms = kFoldSteps * Math::kTerms;
  Word* panels = reinterpret_cast<Word*>(task.panels);
  Word* words = reinterpret_cast<Word*>(task.words);
  const std::int64_t padded_cols = round_up(task.cols, kPanelCols);
  const std::int64_t tiles = (task.rows + kRows - 1) / kRows;
  const T* next_w = span.starts ? static_cast<const T*>(task.next_w) : nullptr;
  const PackedWeights* const packed_w = span.starts ? task.packed_w : nullptr;
  static_assert(kDecodedTerms % Math::kTerms == 0);

  // Weights are packed fold by fold: what was fetched ahead is used before the caches forget it.
  for (std::int64_t term = 0; term < span.terms; term += kTerms) {
    const std::int64_t terms = smaller(kTerms, span.terms - term);
    const std::int64_t steps = (terms + Math::kTerms - 1) / Math::kTerms;
    const std::int64_t left = span.terms - term - terms;
    if (packed_w != nullptr) {
      const StridedRows<T> weights{static_cast<const T*>(task.decoded), decoded_stride(task.cols)};
      for (std::int64_t t = 0; t < terms; t += kDecodedTerms) {
        const std::int64_t some = smaller(kDecodedTerms, terms - t);
        decode_block<Isa, T>(*packed_w, term + t, some, task.packed_first, task.cols,
                             static_cast<T*>(task.decoded), weights.stride);
        pack_panels<Math, T, Isa::kTileVecs>(weights, some, task.cols, nullptr,
                                             panels + t / Math::kTerms * kPanelCols, steps);
      }
    } else {
      const StridedRows<T> weights{span.w + term * span.w_stride, span.w_stride};
      pack_panels<Math, T, Isa::kTileVecs>(weights, terms, task.cols, nullptr, panels, steps);
    }
    WeightPrefetch<T> prefetch(packed_w != nullptr ? nullptr
                               : left > 0          ? span.w + (term + terms) * span.w_stride
                                                   : next_w,
                               left > 0 ? task.cols : task.next_cols, span.w_stride,
                               smaller(kTerms, left > 0 ? left : span.terms),
                               tiles * (padded_cols / kPanelCols));
    // A word that would reach past the row, or that is not the stored number itself, is copied.
    const bool copies = !std::is_same_v<T, typename Math::Stored> || terms % Math::kTerms != 0;
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * task.rows / tiles;
      const std::int64_t rows = (t + 1) * task.rows / tiles - row;
      const Word* a[kRows] = {};
      for (std::int64_t i = 0; i < rows; ++i) {
        if (copies) {
          Math::copy_words(span.rows[row + i] + term, terms, words + i * kFoldSteps);
          a[i] = words + i * kFoldSteps;
        } else {
          a[i] = reinterpret_cast<const Word*>(span.rows[row + i] + term);
        }
      }
      const auto tile = with_rows<kRows>(rows, [](auto count) { return packed_tile<Math, count>; });
      const bool first = span.starts && term == 0;
      float* totals = task.totals + row * padded_cols;
      for (std::int64_t c = 0; c < task.cols; c += kPanelCols) {
        tile(a, panels + c * steps, steps, totals + c, padded_cols, first, prefetch.next());
      }
      if (left > 0 || !span.ends) continue;
      finish_rows<Isa>(task.out, row, rows, totals, padded_cols, 0, task.cols);
    }
  }
}

template <class Math, class T>
void dx_packed(const DxTask& task) {
  for_each_span<T>(task, [&](const DxSpan<T>& span) { dx_packed_span<Math, T>(task, span); });
}

}  // namespace
}  // namespace moegemm::cpu::simd
