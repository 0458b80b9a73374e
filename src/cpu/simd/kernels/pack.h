#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"

/// Rows become panels: [panel][step][PanelVecs * lanes] words, where a step is as many rows as a
/// word has terms and a word holds one column of them. Columns past the last are zero.
namespace moegemm::cpu::simd {
namespace {

/// Rows at a fixed distance, as in one expert's weights.
template <class T>
struct StridedRows {
  const T* first;
  std::int64_t stride;
  const T* operator()(std::int64_t row) const { return first + row * stride; }
};

/// Rows anywhere, as in gathered activations.
template <class T>
struct ListedRows {
  const T* const* rows;
  std::int64_t offset;
  const T* operator()(std::int64_t row) const { return rows[row] + offset; }
};

/// Rows that the pack runs ahead of itself: the cache line of a row this far down arrives while the
/// rows before it are packed.
constexpr std::int64_t kPackAheadRows = 16;

/// Packs `rows` rows of `cols` columns into the first steps of panels of `panel_steps`. `factors`
/// (fp32 words only) multiplies row r by factors[r].
template <class Math, class T, int PanelVecs, class Rows>
void pack_panels(const Rows& source, std::int64_t rows, std::int64_t cols, const float* factors,
                 typename Math::Word* panels, std::int64_t panel_steps) {
  using Isa = typename Math::Isa;
  constexpr std::int64_t kPanelCols = PanelVecs * Isa::kLanes;
  constexpr std::int64_t kLineElems = 64 / std::int64_t{sizeof(T)};
  const std::int64_t steps = (rows + Math::kTerms - 1) / Math::kTerms;
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t row = step * Math::kTerms;
    for (std::int64_t t = 0; t < Math::kTerms; ++t) {
      if (row + kPackAheadRows + t >= rows) break;
      const T* ahead = source(row + kPackAheadRows + t);
      for (std::int64_t c = 0; c < cols; c += kLineElems) Isa::prefetch_l1(ahead + c);
    }
    const T* first = source(row);
    const T* second = Math::kTerms == 2 && row + 1 < rows ? source(row + 1) : nullptr;
    const float* factor = factors != nullptr ? factors + row : nullptr;
    for (std::int64_t c = 0; c < cols; c += kPanelCols) {
      typename Math::Word* words = panels + c * panel_steps + step * kPanelCols;
      const std::int64_t valid = cols - c < kPanelCols ? cols - c : kPanelCols;
      Math::template pack_step<T, PanelVecs>(first + c, second != nullptr ? second + c : nullptr,
                                             valid, factor, words);
    }
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
