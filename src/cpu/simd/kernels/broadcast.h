#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/tile.h"

/// The tile of dX and dW: C[Rows, Vecs * lanes] += A[Rows, steps] B[steps, Vecs * lanes]. One word
/// of A is broadcast, one step of B is Vecs vectors. A word is a float (one term) or two 16-bit
/// numbers (two terms, where an instruction multiplies pairs): `Math` says which.
///
/// Order of summation, the same for every tile of dX and for every tile of dW: steps ascending
/// within kFoldSteps (dW: kOuterFoldSteps), each such sum then added to the total. Folding keeps
/// the rounding error of long fp32 sums near that of pairwise summation.
namespace moegemm::cpu::simd {
namespace {

/// Lines to bring into L2 while a tile runs, two per step, one step `stride` bytes after the other.
struct PrefetchRun {
  const char* first = nullptr;  // null: nothing
  std::int64_t stride_bytes = 0;
};

/// Words of A in rows of their own: word s of row i at rows[i][s].
template <class Math, int Rows>
struct WordRows {
  const typename Math::Word* rows[Rows];
  [[gnu::always_inline]] typename Math::Step word(int i, std::int64_t step) const {
    return Math::broadcast(rows[i] + step);
  }
};

/// Words of A side by side in a packed panel of PanelVecs vectors per step.
template <class Math, int PanelVecs>
struct WordPanel {
  const typename Math::Word* panel;
  [[gnu::always_inline]] typename Math::Step word(int i, std::int64_t step) const {
    return Math::broadcast(panel + step * (PanelVecs * Math::Isa::kLanes) + i);
  }
};

/// Steps of B from a packed panel [steps][Vecs * lanes].
template <class Math, int Vecs>
struct PackedSteps {
  const typename Math::Word* panel;
  [[gnu::always_inline]] void load(typename Math::Step (&b)[Vecs], std::int64_t step) const {
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) {
      b[j] = Math::load_step(panel + (step * Vecs + j) * Math::Isa::kLanes);
    }
  }
};

template <class Math, int Rows, int Vecs, class A, class B>
[[gnu::always_inline]] inline void broadcast_step(typename Math::Isa::Vec (&acc)[Rows][Vecs],
                                                  const A& a, const B& b, std::int64_t step) {
  typename Math::Step b_step[Vecs];
  b.load(b_step, step);
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    const typename Math::Step word = a.word(i, step);
#pragma GCC unroll 16
    for (int j = 0; j < Vecs; ++j) acc[i][j] = Math::accumulate(acc[i][j], word, b_step[j]);
  }
}

template <class Math, int Rows, int Vecs>
[[gnu::always_inline]] inline void fold(const typename Math::Isa::Vec (&acc)[Rows][Vecs],
                                        float* total, std::int64_t total_stride, bool first) {
  using Isa = typename Math::Isa;
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < Vecs; ++j) {
      float* at = total + i * total_stride + j * Isa::kLanes;
      Isa::store(at, first ? acc[i][j] : Isa::add(Isa::load(at), acc[i][j]));
    }
  }
}

/// Steps [step, end) into `total` [Rows, total_stride].
template <class Math, int Rows, int Vecs, class A, class B>
[[gnu::always_inline]] inline void broadcast_fold(const A& a, const B& b, std::int64_t step,
                                                  std::int64_t end, float* total,
                                                  std::int64_t total_stride, bool first,
                                                  PrefetchRun prefetch) {
  using Isa = typename Math::Isa;
  typename Isa::Vec acc[Rows][Vecs];
  load_tile<Isa>(acc, nullptr, 0);
  if (prefetch.first != nullptr) {
    const char* ahead = prefetch.first;
    for (; step < end; ++step) {
      Isa::prefetch_l2(ahead);
      Isa::prefetch_l2(ahead + 64);
      ahead += prefetch.stride_bytes;
      broadcast_step<Math, Rows, Vecs>(acc, a, b, step);
    }
  } else {
    for (; step < end; ++step) broadcast_step<Math, Rows, Vecs>(acc, a, b, step);
  }
  fold<Math, Rows, Vecs>(acc, total, total_stride, first);
}

}  // namespace
}  // namespace moegemm::cpu::simd
