#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/broadcast.h"
#include "cpu/simd/kernels/decode.h"
#include "cpu/simd/kernels/dx/spans.h"
#include "cpu/simd/kernels/finish.h"

/// dX rows = dY rows times W_e, for experts with few rows: reading the weights is what takes time.
/// They are read once, in place, a group of whole rows of the block at a time, while the next group
/// is on its way into L2; the sums wait in L1 from group to group. Narrow columns down many weight
/// rows, with the sums in registers, would reach three quarters of that bandwidth.
///
/// The sums have the order of broadcast.h from weight row 0, so their bits are those of dx_packed.
namespace moegemm::cpu::simd {
namespace {

/// A group of weight rows, and the sums of some rows of dX before and after it.
template <class Math, class T>
struct WeightGroup {
  const T* w;
  std::int64_t stride;
  std::int64_t terms;                // weight rows, kGroupTerms at most
  std::int64_t cols;                 // of the block
  const T* ahead;                    // the group to fetch meanwhile
  const typename Math::Word* words;  // [Rows][kFoldSteps] of dY, at the first weight row
  float* sums;                       // [Rows][padded_cols] since the last fold
  float* totals;                     // [Rows][padded_cols] of the folds before
  std::int64_t padded_cols;
  bool starts_fold;  // the sums are zero
  bool ends_fold;    // the sums go into the totals
  bool first_fold;   // the totals are zero
};

/// Columns of weights that lie in order.
struct InOrder {
  template <class Sums>
  static void join_columns(const Sums&) {}
};

/// Columns [col, col + Vecs * lanes) of a group. `Order` puts sums in the order of the columns.
template <class Math, class T, int Rows, bool Fetch, bool Masked, class Order>
[[gnu::always_inline]] inline void in_place_columns(const WeightGroup<Math, T>& group,
                                                    std::int64_t col) {
  using Isa = typename Math::Isa;
  constexpr int kVecs = Isa::kTileVecs;
  constexpr std::int64_t kLineElems = 64 / std::int64_t{sizeof(T)};
  constexpr std::int64_t kCols = kVecs * Isa::kLanes;
  typename Isa::Vec acc[Rows][kVecs];
  float* const sums = group.sums + col;
  load_tile<Isa>(acc, group.starts_fold ? nullptr : sums, group.padded_cols);
  const auto add_step = [&](std::int64_t step, const T* row, const T* second)
      __attribute__((always_inline)) {
    typename Math::Step b[kVecs];
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; j += 2) {
      typename Math::Step pair[2];
      Math::template load_in_place<T, Masked>(pair, row, second, col + j * Isa::kLanes, group.cols);
      b[j] = pair[0];
      b[j + 1] = pair[1];
    }
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const typename Math::Step word = Math::broadcast(group.words + i * kFoldSteps + step);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Math::accumulate(acc[i][j], word, b[j]);
    }
  };
  const std::int64_t whole_steps = group.terms / Math::kTerms;
  const T* row = group.w;
  const T* ahead = Fetch ? group.ahead + col : nullptr;
  for (std::int64_t step = 0; step < whole_steps; ++step) {
    if constexpr (Fetch) {
#pragma GCC unroll 2
      for (std::int64_t t = 0; t < Math::kTerms; ++t, ahead += group.stride) {
#pragma GCC unroll 4
        for (std::int64_t c = 0; c < kCols; c += kLineElems) Isa::prefetch_l2(ahead + c);
      }
    }
    add_step(step, row, Math::kTerms == 2 ? row + group.stride : nullptr);
    row += Math::kTerms * group.stride;
  }
  if (whole_steps * Math::kTerms < group.terms) add_step(whole_steps, row, nullptr);

  if (!group.ends_fold) {
    store_tile<Isa>(acc, sums, group.padded_cols);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) Order::join_columns(acc[i]);
    fold<Math, Rows, kVecs>(acc, group.totals + col, group.padded_cols, group.first_fold);
  }
}

template <class Math, class T, int Rows, bool Fetch, class Order>
[[gnu::noinline]] void in_place_group(const WeightGroup<Math, T>& group) {
  constexpr std::int64_t kCols = Math::Isa::kTileVecs * Math::Isa::kLanes;
  std::int64_t col = 0;
  for (; col + kCols <= group.cols; col += kCols) {
    in_place_columns<Math, T, Rows, Fetch, false, Order>(group, col);
  }
  if (col < group.cols) in_place_columns<Math, T, Rows, Fetch, true, Order>(group, col);
}

/// A group of weight rows times all rows of a task; `words` and `sums` are those of the first.
template <class Math, class T, class Order = InOrder>
[[gnu::always_inline]] inline void add_group(const DxTask& task, WeightGroup<Math, T>& group) {
  using Isa = typename Math::Isa;
  const std::int64_t chunks = (task.rows + Isa::kTileRows - 1) / Isa::kTileRows;
  const typename Math::Word* const words = group.words;
  float* const sums = group.sums;
  float* const totals = group.totals;
  for (std::int64_t c = 0; c < chunks; ++c) {
    const std::int64_t row = c * task.rows / chunks;
    const std::int64_t rows = (c + 1) * task.rows / chunks - row;
    group.words = words + row * kFoldSteps;
    group.sums = sums + row * group.padded_cols;
    group.totals = totals + row * group.padded_cols;
    const bool fetch = c == 0 && group.ahead != nullptr;
    with_rows<Isa::kTileRows>(rows, [&](auto count) {
      fetch ? in_place_group<Math, T, count, true, Order>(group)
            : in_place_group<Math, T, count, false, Order>(group);
    });
  }
  group.words = words;
  group.sums = sums;
  group.totals = totals;
}

/// The same of a quantised W, from weight row `term` on, some columns at a time.
template <class Math, class T>
void add_packed_group(const DxTask& task, const PackedWeights& w, std::int64_t term,
                      WeightGroup<Math, T> group) {
  T* const decoded = static_cast<T*>(task.decoded);
  const WeightGroup<Math, T> first = group;
  group.w = decoded;
  group.stride = decoded_stride(kDecodedCols);
  group.ahead = nullptr;
  for (std::int64_t c = 0; c < task.cols; c += kDecodedCols) {
    group.cols = task.cols - c < kDecodedCols ? task.cols - c : kDecodedCols;
    group.sums = first.sums + c;
    group.totals = first.totals + c;
    decode_block<typename Math::Isa, T>(w, term, group.terms, task.packed_first + c, group.cols,
                                        decoded, group.stride);
    add_group<Math, T>(task, group);
  }
}

/// Where nothing adds a group without scratch memory.
struct DecodedInScratch {
  template <class Group>
  bool add(const DxTask&, const PackedWeights&, std::int64_t, const Group&) {
    return false;
  }
};

/// One span of the contraction into the totals.
template <class Math, class T, class Decoded>
void dx_in_place_span(const DxTask& task, const DxSpan<T>& span, std::int64_t padded_cols) {
  using Word = typename Math::Word;
  constexpr std::int64_t kFoldTerms = kFoldSteps * Math::kTerms;
  static_assert(kFoldTerms % kGroupTerms == 0);
  Word* const words = reinterpret_cast<Word*>(task.words);
  WeightGroup<Math, T> group;
  group.stride = span.w_stride;
  group.cols = task.cols;
  group.padded_cols = padded_cols;
  group.totals = task.totals;
  group.sums = task.totals + task.rows * padded_cols;
  Decoded decoded;
  for (std::int64_t term = 0; term < span.terms; term += kGroupTerms) {
    const std::int64_t in_fold = term % kFoldTerms;
    const std::int64_t left = span.terms - term;
    if (in_fold == 0) {
      const std::int64_t terms = left < kFoldTerms ? left : kFoldTerms;
      for (std::int64_t i = 0; i < task.rows; ++i) {
        Math::copy_words(span.rows[i] + term, terms, words + i * kFoldSteps);
      }
    }
    group.words = words + in_fold / Math::kTerms;
    group.terms = left < kGroupTerms ? left : kGroupTerms;
    group.starts_fold = in_fold == 0;
    group.ends_fold = in_fold + kGroupTerms == kFoldTerms || left <= kGroupTerms;
    group.first_fold = span.starts && term < kFoldTerms;
    if (span.starts && task.packed_w != nullptr) {
      if (!decoded.add(task, *task.packed_w, term, group)) {
        add_packed_group<Math, T>(task, *task.packed_w, term, group);
      }
      continue;
    }
    group.w = span.w + term * span.w_stride;
    group.ahead = left > kGroupTerms ? group.w + kGroupTerms * span.w_stride
                  : span.starts      ? static_cast<const T*>(task.next_w)
                                     : nullptr;
    add_group<Math, T>(task, group);
  }
}

template <class Math, class T, class Decoded = DecodedInScratch>
void dx_in_place(const DxTask& task) {
  using Isa = typename Math::Isa;
  constexpr std::int64_t kCols = Isa::kTileVecs * Isa::kLanes;
  const std::int64_t padded_cols = (task.cols + kCols - 1) / kCols * kCols;
  for_each_span<T>(task, [&](const DxSpan<T>& span) {
    dx_in_place_span<Math, T, Decoded>(task, span, padded_cols);
  });
  for (std::int64_t i = 0; i < task.rows; ++i) {
    if (task.out.rows[i] == nullptr) continue;
    float* const total = task.totals + i * padded_cols;
    for (std::int64_t c = 0; c < task.cols; c += kCols) {
      Math::template restore_column_order<Isa::kTileVecs>(total + c);
    }
    finish_rows<Isa>(task.out, i, 1, total, padded_cols, 0, task.cols);
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
