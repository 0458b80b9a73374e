#include "cpu/simd/kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <type_traits>

#include "cpu/simd/isa/shared.h"
#include "cpu/simd/kernels/decoded/floats.h"
#include "cpu/simd/kernels/element.h"

/// AVX2 with FMA and F16C: every x86 core of the last ten years.
namespace moegemm::cpu::simd {
namespace {

struct Avx2 : Prefetches, CopiedParts<Avx2> {
  using Vec = __m256;
  using Quad = __m128;
  static constexpr std::int64_t kLanes = 8;
  // 16 registers. 3 x 4 dot: 12 accumulators, 3 of X, 1 of W. 6 x 2 broadcast: 12 + 2 + 1.
  static constexpr bool kFewRegisters = true;
  static constexpr int kDotRows = 3;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 2;
  static constexpr int kOuterRows = 4;
  static constexpr int kOuterVecs = 2;
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec broadcast(float value) { return _mm256_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

  static Vec load(const float* at) { return _mm256_loadu_ps(at); }
  static Vec load(const Bf16* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(at)), 16));
  }
  static Vec load(const Fp16* at) { return _mm256_cvtph_ps(load_half(at)); }

  static void store(float* at, Vec v) { _mm256_storeu_ps(at, v); }
  static void store(Bf16* at, Vec v) { store_half(at, round_bf16(v)); }
  static void store(Fp16* at, Vec v) { store_half(at, _mm256_cvtps_ph(v, kNearest)); }

  template <class T>
  static void store_exact(T* at, Vec v) {
    store(at, v);
  }

  /// Sixteen elements to look up: of 16 bits as two tables of bytes, of 32 bits as two vectors.
  struct ByteTables {
    __m128i low, high;
    template <class T>
    explicit ByteTables(const T* table) : ByteTables(load_half(table), load_half(table + 8)) {}
    ByteTables(__m128i first, __m128i second) {
      const __m128i byte = _mm_set1_epi16(0xff);
      low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
      high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    }
  };
  struct FloatTables {
    Vec low, high;
    explicit FloatTables(const float* table) : low(load(table)), high(load(table + 8)) {}
    FloatTables(Vec first, Vec second) : low(first), high(second) {}
  };
  template <class T>
  using TableOf = std::conditional_t<sizeof(T) == 2, ByteTables, FloatTables>;

  template <class T>
  static TableOf<T> load_table(const T* table) {
    return TableOf<T>(table);
  }
  template <class T>
  static TableOf<T> make_table(const float* values, float scale) {
    const Vec low = mul(load(values), broadcast(scale));
    const Vec high = mul(load(values + 8), broadcast(scale));
    if constexpr (sizeof(T) == 4) {
      return {low, high};
    } else if constexpr (std::is_same_v<T, Fp16>) {
      return {_mm256_cvtps_ph(low, kNearest), _mm256_cvtps_ph(high, kNearest)};
    } else {
      return {round_bf16(low), round_bf16(high)};
    }
  }

  static constexpr bool kShiftsTables = false;
  /// 32 nibbles of 16 bytes.
  template <bool HighFirst, class T>
  [[gnu::always_inline]] static void look_up_nibbles(const std::uint8_t* bytes,
                                                     const TableOf<T>& table, T* out) {
    const __m128i packed = load_half(bytes);
    const __m128i low = _mm_and_si128(packed, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15));
    const __m128i first = HighFirst ? high : low;
    const __m128i second = HighFirst ? low : high;
    const __m128i places[2] = {_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second)};
    if constexpr (sizeof(T) == 2) {
      for (int i = 0; i < 2; ++i) {
        const __m128i lows = _mm_shuffle_epi8(table.low, places[i]);
        const __m128i highs = _mm_shuffle_epi8(table.high, places[i]);
        store_half(out + 16 * i, _mm_unpacklo_epi8(lows, highs));
        store_half(out + 16 * i + 8, _mm_unpackhi_epi8(lows, highs));
      }
    } else {
      for (int i = 0; i < 4; ++i) {
        const __m128i eight = i % 2 == 0 ? places[i / 2] : _mm_srli_si128(places[i / 2], 8);
        const __m256i place = _mm256_cvtepu8_epi32(eight);
        const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28));
        store(out + 8 * i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, place),
                                            _mm256_permutevar8x32_ps(table.high, place), is_upper));
      }
    }
  }

  static constexpr bool kLooksUpFp8 = true;
  using Fp8Table = ByteTables;
  /// 32 values; the table is that of kFp8Values.
  [[gnu::always_inline]] static void look_up_fp8(const std::uint8_t* bytes,
                                                 const ByteTables& tables, Bf16* out) {
    const __m256i lows = _mm256_broadcastsi128_si256(tables.low);
    const __m256i highs = _mm256_broadcastsi128_si256(tables.high);
    for (int i = 0; i < 2; ++i) {
      const __m256i words = _mm256_cvtepu8_epi16(load_half(bytes + 16 * i));
      const __m256i exponent = _mm256_and_si256(words, _mm256_set1_epi16(0x78));
      const __m256i denormal = _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256());
      const __m256i place = _mm256_or_si256(_mm256_and_si256(words, _mm256_set1_epi16(7)),
                                            _mm256_and_si256(denormal, _mm256_set1_epi16(8)));
      // 0x80 in the other half of a word reads as zero.
      const __m256i low_places = _mm256_or_si256(place, _mm256_set1_epi16(-32768));
      const __m256i high_places =
          _mm256_or_si256(_mm256_slli_epi16(place, 8), _mm256_set1_epi16(0x80));
      const __m256i mantissa = _mm256_or_si256(_mm256_shuffle_epi8(lows, low_places),
                                               _mm256_shuffle_epi8(highs, high_places));
      const __m256i value = _mm256_add_epi16(mantissa, _mm256_slli_epi16(exponent, 4));
      const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
      const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)),
                                             _mm256_set1_epi16(0x7f));
      const __m256i quiet = _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i),
                          _mm256_or_si256(_mm256_xor_si256(value, sign), quiet));
    }
  }

  /// Sixteen bf16 to look up as floats: their low and their high bytes, in both halves.
  struct NibbleFloats {
    __m256i low, high;
  };
  static __m256i load_twice(const std::uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(load_half(bytes));
  }
  static NibbleFloats stored_nibbles(const PackedWeights& w, std::int64_t table) {
    const std::uint8_t* const at = w.byte_tables + 32 * table;
    return {load_twice(at), load_twice(at + 16)};
  }
  /// Of a scale of bf16, whose upper byte is added to all but element 8, which is zero.
  static NibbleFloats shifted_nibbles(const PackedWeights& w, const std::uint16_t* bits) {
    const NibbleFloats table = stored_nibbles(w, *bits & 0xff);
    const __m256i upper = _mm256_andnot_si256(_mm256_set_epi64x(0xff, 0, 0xff, 0),
                                              _mm256_set1_epi8(static_cast<char>(*bits >> 8)));
    return {table.low, _mm256_add_epi8(table.high, upper)};
  }
  /// bf16(values * scale), whose scale is finite.
  static NibbleFloats made_nibbles(const float* values, float scale) {
    const __m256i halves =
        _mm256_setr_epi8(2, 6, 10, 14, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1, 2, 6, 10, 14,
                         3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1);
    const auto bytes_of = [&](Vec products) {
      const __m256i bits = _mm256_castps_si256(products);
      const __m256i tie_to_even =
          _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded =
          _mm256_add_epi32(bits, _mm256_add_epi32(tie_to_even, _mm256_set1_epi32(0x7fff)));
      return _mm256_shuffle_epi8(rounded, halves);
    };
    const __m256i bytes = _mm256_unpacklo_epi32(bytes_of(mul(load(values), broadcast(scale))),
                                                bytes_of(mul(load(values + 8), broadcast(scale))));
    return {_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5)),
            _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(2, 6, 3, 7, 2, 6, 3, 7))};
  }
  /// 64 nibbles as floats, as Dot<Bf16> loads 64 elements: of each sixteen columns the even ones,
  /// then the odd ones. The first 32 have one table, the others another.
  template <bool HighFirst>
  [[gnu::always_inline]] static void nibble_floats(const std::uint8_t* bytes,
                                                   const NibbleFloats& first,
                                                   const NibbleFloats& second, Vec (&w)[8]) {
    // Bytes 8 s + 4 h + d of sixteen columns s to half h, where those of two s are neighbours: one
    // becomes the lower and one the upper half of lane d.
    const __m256i order = _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0,
                                           4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m256i halves =
        _mm256_permutevar8x32_epi32(load_bytes(bytes), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    const __m256i packed = _mm256_shuffle_epi8(halves, order);
    const __m256i low = _mm256_and_si256(packed, _mm256_set1_epi8(15));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), _mm256_set1_epi8(15));
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m256i places = (odd != 0) != HighFirst ? high : low;
      split_words(_mm256_unpacklo_epi8(_mm256_shuffle_epi8(first.low, places),
                                       _mm256_shuffle_epi8(first.high, places)),
                  w[odd], w[2 + odd]);
      split_words(_mm256_unpackhi_epi8(_mm256_shuffle_epi8(second.low, places),
                                       _mm256_shuffle_epi8(second.high, places)),
                  w[4 + odd], w[6 + odd]);
    }
  }

  /// The same of 64 values of fp8. `table` is that of store_fp8_places.
  [[gnu::always_inline]] static void fp8_floats(const std::uint8_t* bytes,
                                                const std::uint8_t* table, Vec (&w)[8]) {
    const __m256i low = load_twice(table), high = load_twice(table + 16);
    const __m256i low_of_small = load_twice(table + 32), high_of_small = load_twice(table + 48);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i packed = _mm256_permute4x64_epi64(load_bytes(bytes + 32 * i), 0xd8);
      const __m256i places = _mm256_and_si256(packed, _mm256_set1_epi8(15));
      const __m256i exponent = _mm256_and_si256(packed, _mm256_set1_epi8(0x70));
      const __m256i small = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
      const __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(packed, _mm256_set1_epi8(0x7f)),
                                            _mm256_set1_epi8(0x7f));
      const __m256i lows = _mm256_blendv_epi8(_mm256_shuffle_epi8(low, places),
                                              _mm256_shuffle_epi8(low_of_small, places), small);
      const __m256i highs = _mm256_blendv_epi8(_mm256_shuffle_epi8(high, places),
                                               _mm256_shuffle_epi8(high_of_small, places), small);
      const __m256i sign = _mm256_and_si256(packed, _mm256_set1_epi8(-128));
      const __m256i shifted = _mm256_add_epi8(highs, _mm256_srli_epi16(exponent, 4));
      const __m256i upper = _mm256_or_si256(_mm256_xor_si256(shifted, sign),
                                            _mm256_and_si256(nan, _mm256_set1_epi8(0x7f)));
      const __m256i lower = _mm256_or_si256(lows, nan);
      split_words(_mm256_unpacklo_epi8(lower, upper), w[4 * i], w[4 * i + 1]);
      split_words(_mm256_unpackhi_epi8(lower, upper), w[4 * i + 2], w[4 * i + 3]);
    }
  }
  static __m256i load_bytes(const std::uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  [[gnu::always_inline]] static void split_words(__m256i pairs, Vec& lower, Vec& upper) {
    lower = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    upper = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)));
  }
  /// Sums of columns in that order into the order of the columns.
  [[gnu::always_inline]] static void join_columns(Vec& even, Vec& odd) {
    const Vec low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    even = _mm256_permute2f128_ps(low, high, 0x20);
    odd = _mm256_permute2f128_ps(low, high, 0x31);
  }

  static float widen_half(std::uint16_t bits) { return _cvtsh_ss(bits); }
  /// Two vectors of values. As fp16 the same bits are 2^-8 times as much.
  [[gnu::always_inline]] static void load_e4m3(const std::uint8_t* bytes, Vec (&values)[2]) {
    // Extended with its sign, a byte has that in the upper of nine bits after the shift.
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_half(bytes)), 7);
    const __m256i largest = _mm256_set1_epi16(0x3f80);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(shifted, largest), largest);
    const __m256i halves =
        _mm256_or_si256(_mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbf80))),
                        _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    values[0] = mul(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), broadcast(256.0f));
    values[1] = mul(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), broadcast(256.0f));
  }

  /// The sums over the lanes of four vectors.
  static Quad reduce4(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256d abd = _mm256_castps_pd(ab);
    const __m256d cdd = _mm256_castps_pd(cd);
    const Vec abcd = add(_mm256_castpd_ps(_mm256_unpacklo_pd(abd, cdd)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(abd, cdd)));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
  }
  static void store_quad(float* at, Quad v) { _mm_storeu_ps(at, v); }

  static __m128i round_bf16(Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i top = _mm256_srli_epi32(bits, 16);
    const __m256i tie_to_even = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(tie_to_even, _mm256_set1_epi32(0x7fff))), 16);
    // Rounding could carry a NaN into Inf or zero.
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  template <class T>
  static __m128i load_half(const T* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  template <class T>
  static void store_half(T* at, __m128i v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), v);
  }

  template <class T>
  struct Dot : WidenedDot<Avx2, T> {};
};

/// 16 bf16, the even ones in one pass and the odd ones in another: a shift or a mask makes floats
/// of them.
template <>
struct Avx2::Dot<Bf16> {
  using Reg = Vec;
  static constexpr std::int64_t kStep = 2 * kLanes;
  static constexpr int kPasses = 2;
  template <int Pass>
  static Reg load(const Bf16* at) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (Pass == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)));
  }
  template <int Pass>
  static Reg load_partial(const Bf16* at, std::int64_t count) {
    Bf16 whole[kStep] = {};
    for (std::int64_t i = 0; i < count; ++i) whole[i] = at[i];
    return load<Pass>(whole);
  }
  static Vec accumulate(Vec acc, Reg a, Reg b) { return fma(a, b, acc); }
};

}  // namespace

const KernelTable* avx2_kernels() {
  static constexpr KernelTable kTable = float_kernel_table<Avx2>();
  return &kTable;
}

}  // namespace moegemm::cpu::simd
#else
namespace moegemm::cpu::simd {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace moegemm::cpu::simd
#endif
