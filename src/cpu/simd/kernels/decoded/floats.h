#pragma once

#include <cstdint>

#include "cpu/simd/kernels/decoded/products.h"
#include "cpu/simd/kernels/float_math.h"
#include "cpu/simd/kernels/table.h"

/// Decoded weights as floats, for machines that do not multiply bf16, in the order in which their
/// Dot<Bf16> loads elements: of each two vectors' columns the even ones, then the odd ones.
namespace moegemm::cpu::simd {
namespace {

template <class IsaType>
struct FloatUnit {
  using Isa = IsaType;
  using Element = float;
  static constexpr int kVecs = kReadCols / Isa::kLanes;
  using Columns = typename Isa::Vec[kVecs];
  /// For more rows than registers have room for: where tiles read floats anyway.
  static constexpr bool kReadsBlocks = Isa::kFewRegisters;

  [[gnu::always_inline]] static typename Isa::Vec accumulate(typename Isa::Vec acc, const float* x,
                                                             typename Isa::Vec w) {
    return Isa::fma(Isa::load(x), w, acc);
  }
  static void pack_row(const Bf16* row, std::int64_t count, std::int64_t rows, float* out) {
    static_assert(Isa::template Dot<Bf16>::kPasses == 2);
    widen_row<Isa>(row, count, rows * Isa::kLanes, out);
  }
  [[gnu::always_inline]] static auto stored(const PackedWeights& w, std::int64_t table) {
    return Isa::stored_nibbles(w, table);
  }
  [[gnu::always_inline]] static auto shifted(const PackedWeights& w, const std::uint16_t* bits) {
    return Isa::shifted_nibbles(w, bits);
  }
  [[gnu::always_inline]] static auto made(const float* values, float scale) {
    return Isa::made_nibbles(values, scale);
  }
  static constexpr bool kJoinsTables = false;
  template <bool HighFirst, bool, bool, class Table>
  [[gnu::always_inline]] static void nibbles(const std::uint8_t* bytes, const Table& first,
                                             const Table& second, Columns& to) {
    Isa::template nibble_floats<HighFirst>(bytes, first, second, to);
  }

  static constexpr bool kFp8EvensFirst = true;
  static bool reads_fp8(const PackedWeights&) { return true; }
  /// bf16 for the sixteen places that e4m3's lower four bits name, the first of which is the
  /// exponent's last: low bytes, high bytes, then both where the exponent's other bits are zero.
  /// Else these are added to the high byte.
  static constexpr std::int64_t kFp8TableBytes = 64;
  static void store_fp8_table(float scale, std::uint8_t* at) {
    alignas(64) Bf16 base[16];
    fill_table<Isa, Bf16>(kFp8Values, scale, base);
    // Eight normal numbers, eight denormal ones, and the normal ones with the next exponent.
    std::uint8_t low[24], high[24];
    for (int i = 0; i < 16; ++i) low[i] = static_cast<std::uint8_t>(base[i].bits);
    for (int i = 0; i < 16; ++i) high[i] = static_cast<std::uint8_t>(base[i].bits >> 8);
    for (int i = 0; i < 8; ++i) low[16 + i] = static_cast<std::uint8_t>(base[i].bits + 0x80);
    for (int i = 0; i < 8; ++i)
      high[16 + i] = static_cast<std::uint8_t>((base[i].bits + 0x80) >> 8);
    __builtin_memcpy(at, low, 8);
    __builtin_memcpy(at + 8, low + 16, 8);
    __builtin_memcpy(at + 16, high, 8);
    __builtin_memcpy(at + 24, high + 16, 8);
    __builtin_memcpy(at + 32, low + 8, 16);
    __builtin_memcpy(at + 48, high + 8, 16);
  }
  [[gnu::always_inline]] static void fp8(const std::uint8_t* bytes, const std::uint8_t* table,
                                         Columns& to) {
    Isa::fp8_floats(bytes, table, to);
  }
  template <int Vecs>
  [[gnu::always_inline]] static void join_columns(typename Isa::Vec (&sums)[Vecs]) {
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; v += 2) Isa::join_columns(sums[v], sums[v + 1]);
  }
};

template <class Isa>
constexpr KernelTable float_kernel_table() {
  return with_decoded_registers<FloatUnit<Isa>, FloatMath<Isa>>(kernel_table<Isa>());
}

}  // namespace
}  // namespace moegemm::cpu::simd
