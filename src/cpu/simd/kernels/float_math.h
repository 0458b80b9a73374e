#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"

namespace moegemm::cpu::simd {
namespace {

/// Broadcast kernels over fp32 words: every input dtype, converted when it is packed or loaded.
template <class IsaType>
struct FloatMath {
  using Isa = IsaType;
  using Word = float;
  using Stored = float;  ///< the dtype whose rows are words already
  using Vec = typename Isa::Vec;
  using Step = Vec;
  static constexpr std::int64_t kTerms = 1;

  [[gnu::always_inline]] static Step broadcast(const Word* word) { return Isa::broadcast(*word); }
  [[gnu::always_inline]] static Step load_step(const Word* words) { return Isa::load(words); }
  [[gnu::always_inline]] static Vec accumulate(Vec acc, Step a, Step b) {
    return Isa::fma(a, b, acc);
  }

  template <class T, int Vecs>
  [[gnu::always_inline]] static void pack_step(const T* row, const T*, std::int64_t valid,
                                               const float* factor, Word* words) {
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) {
      const std::int64_t left = valid - j * Isa::kLanes;
      Vec values = left >= Isa::kLanes ? Isa::load(row + j * Isa::kLanes)
                   : left > 0          ? Isa::load_partial(row + j * Isa::kLanes, left)
                                       : Isa::zero();
      if (factor != nullptr) values = Isa::mul(values, Isa::broadcast(*factor));
      Isa::store(words + j * Isa::kLanes, values);
    }
  }

  /// Two vectors of a step straight from a weight row, from column `col`; columns past `valid` read
  /// as zero.
  template <class T, bool Masked>
  [[gnu::always_inline]] static void load_in_place(Step (&b)[2], const T* row, const T*,
                                                   std::int64_t col, std::int64_t valid) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j, col += Isa::kLanes) {
      if constexpr (Masked) {
        b[j] = valid - col >= Isa::kLanes ? Isa::load(row + col)
               : valid > col              ? Isa::load_partial(row + col, valid - col)
                                          : Isa::zero();
      } else {
        b[j] = Isa::load(row + col);
      }
    }
  }

  /// load_in_place keeps columns in order.
  template <int Vecs>
  static void restore_column_order(float*) {}

  /// The words of `terms` elements of an A row.
  template <class T>
  static void copy_words(const T* row, std::int64_t terms, Word* words) {
    std::int64_t t = 0;
    for (; t + Isa::kLanes <= terms; t += Isa::kLanes) Isa::store(words + t, Isa::load(row + t));
    if (t < terms) Isa::store_partial(words + t, Isa::load_partial(row + t, terms - t), terms - t);
  }
};

}  // namespace
}  // namespace moegemm::cpu::simd
