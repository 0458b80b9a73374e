#pragma once

#include <array>
#include <type_traits>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/decode.h"
#include "cpu/simd/kernels/dot.h"
#include "cpu/simd/kernels/dw.h"
#include "cpu/simd/kernels/dx/in_place.h"
#include "cpu/simd/kernels/dx/packed.h"
#include "cpu/simd/kernels/element.h"
#include "cpu/simd/kernels/float_math.h"

namespace moegemm::cpu::simd {
namespace {

template <class Isa, class T>
void round_run(const float* from, float factor, std::int64_t count, void* to) {
  T* const out = static_cast<T*>(to);
  const typename Isa::Vec factors = Isa::broadcast(factor);
  std::int64_t i = 0;
  for (; i + Isa::kLanes <= count; i += Isa::kLanes) {
    Isa::store_exact(out + i, Isa::mul(Isa::load(from + i), factors));
  }
  if (i == count) return;
  T rest[Isa::kLanes];
  Isa::store_exact(rest, Isa::mul(Isa::load_partial(from + i, count - i), factors));
  for (std::int64_t j = i; j < count; ++j) out[j] = rest[j - i];
}

/// The kernels of one dtype; `Math` multiplies in dX and dW.
template <class Isa, class T, class Math>
constexpr DTypeKernels dtype_kernels() {
  DTypeKernels kernels = {.dtype = kDtypeOf<T>};
  kernels.forward = forward_task<Isa, T>;
  kernels.pack_x = pack_x<Isa, T>;
  kernels.dot_step = Isa::template Dot<T>::kStep;
  kernels.packed_x_bytes = sizeof(TileElement<Isa, T>);
  kernels.min_packed_x = kWidens<Isa, T> ? kMinWidenedX : kMinPackedX;
  kernels.dx_packed = dx_packed<Math, T>;
  kernels.dx_in_place = dx_in_place<Math, T>;
  kernels.dw = dw_chunk<Math, T>;
  // A weighted dY row is no longer a 16-bit number: products and sums in fp32.
  kernels.dw_weighted = dw_chunk<FloatMath<Isa>, T>;
  kernels.decode = decode_task<Isa, T>;
  kernels.round = round_run<Isa, T>;
  kernels.terms_per_step = Math::kTerms;
  return kernels;
}

template <class Isa, class Bf16Math, class... T>
constexpr auto kernels_of_all(ElementTypes<T...>) {
  using Widened = FloatMath<Isa>;
  return std::array{
      dtype_kernels<Isa, T, std::conditional_t<std::is_same_v<T, Bf16>, Bf16Math, Widened>>()...};
}

template <class Isa, class Bf16Math = FloatMath<Isa>>
constexpr KernelTable kernel_table() {
  static_assert(Isa::kDotRows <= kMaxTileRows && Isa::kTileRows <= kMaxTileRows);
  static_assert(kMinPackedX > 3 * Isa::kDotRows);
  static_assert(!Isa::kFewRegisters || kMinWidenedX > Isa::kDotRows);
  static_assert(Isa::kLanes * 4 <= kParkedFloatsPerRow);
  static_assert(Isa::kTileVecs * Isa::kLanes <= kMaxPanelCols);
  static_assert(Isa::kOuterVecs * Isa::kLanes <= kMaxPanelCols);
  KernelTable table;
  table.formats = kernels_of_all<Isa, Bf16Math>(kElementTypes);
  table.lanes = Isa::kLanes;
  table.dot_rows = Isa::kDotRows;
  table.tile_rows = Isa::kTileRows;
  table.tile_cols = Isa::kTileVecs * Isa::kLanes;
  table.outer_rows = Isa::kOuterRows;
  table.outer_cols = Isa::kOuterVecs * Isa::kLanes;
  return table;
}

}  // namespace
}  // namespace moegemm::cpu::simd
