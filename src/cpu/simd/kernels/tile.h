#pragma once

#include <cstdint>
#include <type_traits>

/// The accumulators of a tile: [Rows][Vecs] vectors, which must stay in registers.
namespace moegemm::cpu::simd {
namespace {

/// From memory [Rows][row_stride], or zeros for a null pointer.
template <class Isa, int Rows, int Vecs>
[[gnu::always_inline]] inline void load_tile(typename Isa::Vec (&acc)[Rows][Vecs],
                                             const float* from, std::int64_t row_stride) {
  if (from != nullptr) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < Vecs; ++j) acc[i][j] = Isa::load(from + i * row_stride + j * Isa::kLanes);
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < Vecs; ++j) acc[i][j] = Isa::zero();
    }
  }
}

template <class Isa, int Rows, int Vecs>
[[gnu::always_inline]] inline void store_tile(const typename Isa::Vec (&acc)[Rows][Vecs], float* to,
                                              std::int64_t row_stride) {
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < Vecs; ++j) Isa::store(to + i * row_stride + j * Isa::kLanes, acc[i][j]);
  }
}

/// make(n) with the number of rows, at most Rows, as a constant.
template <int Rows, class Make>
auto with_rows(std::int64_t rows, const Make& make) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return with_rows<Rows - 1>(rows, make);
  }
  return make(std::integral_constant<int, Rows>{});
}

}  // namespace
}  // namespace moegemm::cpu::simd
