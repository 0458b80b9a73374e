#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "cpu/simd/isa/shared.h"
#include "cpu/simd/kernels/element.h"

/// AVX-512 (F, BW, VL, DQ) for the two files compiled with it.
namespace moegemm::cpu::simd {
namespace {

struct Avx512 : Prefetches {
  using Vec = __m512;
  using Quad = __m128;
  using Words = __m512i;  ///< 32 elements of 16 bits
  static constexpr std::int64_t kLanes = 16;
  // 32 registers. 6 x 4 dot: 24 accumulators, 6 of X, 1 of W. 6 x 4 broadcast: 24 + 4 + 1.
  static constexpr bool kFewRegisters = false;
  static constexpr int kDotRows = 6;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 4;
  static constexpr int kOuterRows = 8;
  static constexpr int kOuterVecs = 2;
  static constexpr bool kStreams = true;

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec broadcast(float value) { return _mm512_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

  static __mmask16 first(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

  static Vec load(const float* at) { return _mm512_loadu_ps(at); }
  static Vec load(const Bf16* at) { return widen_bf16(_mm256_loadu_si256(half(at))); }
  static Vec load(const Fp16* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(half(at))); }
  static Vec load_partial(const float* at, std::int64_t count) {
    return _mm512_maskz_loadu_ps(first(count), at);
  }
  static Vec load_partial(const Bf16* at, std::int64_t count) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first(count), at));
  }
  static Vec load_partial(const Fp16* at, std::int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), at));
  }

  static void store(float* at, Vec v) { _mm512_storeu_ps(at, v); }
  static void store(Bf16* at, Vec v) { _mm256_storeu_si256(half(at), round_bf16(v)); }
  static void store(Fp16* at, Vec v) { _mm256_storeu_si256(half(at), round_fp16(v)); }
  static void store_partial(float* at, Vec v, std::int64_t count) {
    _mm512_mask_storeu_ps(at, first(count), v);
  }
  static void store_partial(Bf16* at, Vec v, std::int64_t count) {
    _mm256_mask_storeu_epi16(at, first(count), round_bf16(v));
  }
  static void store_partial(Fp16* at, Vec v, std::int64_t count) {
    _mm256_mask_storeu_epi16(at, first(count), round_fp16(v));
  }

  static void store_exact(float* at, Vec v) { store(at, v); }
  static void store_exact(Fp16* at, Vec v) { store(at, v); }
  /// With denormals.
  static void store_exact(Bf16* at, Vec v) { _mm256_storeu_si256(half(at), round_bf16_bits(v)); }

  /// Sixteen elements to look up: of 16 bits twice, so that a place may have any fifth bit. Read
  /// as they lie in memory: a load that repeats half a vector takes a shuffle.
  template <class T>
  static __m512i load_table(const T* table) {
    return _mm512_loadu_si512(table);
  }
  /// round(values * scale).
  template <class T>
  static __m512i make_table(const float* values, float scale) {
    const Vec products = mul(load(values), broadcast(scale));
    if constexpr (sizeof(T) == 4) {
      return _mm512_castps_si512(products);
    } else if constexpr (std::is_same_v<T, Fp16>) {
      return _mm512_broadcast_i64x4(round_fp16(products));
    } else {
#ifdef __AVX512BF16__
      // The products are zero or normal numbers, which this rounding leaves as they are.
      if (is_moderate(scale)) return (__m512i)_mm512_cvtne2ps_pbh(products, products);
#endif
      return _mm512_broadcast_i64x4(round_bf16_bits(products));
    }
  }
  /// The table at `table` with `bits` added to those of all but element 8, which is zero.
  static constexpr bool kShiftsTables = true;
  static __m512i shift_table(const Bf16* table, const std::uint16_t* bits) {
    const __m512i all = load_table(table);
    return _mm512_mask_add_epi16(all, 0xfeff'feffu, all,
                                 _mm512_set1_epi16(static_cast<short>(*bits)));
  }

  /// Two tables joined, each with one of two neighbouring scales added.
  static __m512i shift_tables(const Bf16* first, const Bf16* second, const std::uint16_t* bits) {
    int pair;
    __builtin_memcpy(&pair, bits, sizeof(pair));
    const __m512i places =
        _mm512_inserti64x4(_mm512_set1_epi16(0x0100), _mm256_set1_epi16(0x0302), 1);
    const __m512i both = _mm512_shuffle_epi8(_mm512_set1_epi32(pair), places);
    const __m512i all = join_tables(load_table(first), load_table(second));
    return _mm512_mask_add_epi16(all, 0xfeff'feffu, all, both);
  }

  /// Elements of 16 bits for the 32 nibbles of 16 bytes.
  template <bool HighFirst>
  [[gnu::always_inline]] static __m512i nibble_words(const std::uint8_t* bytes, __m512i table) {
    // A byte in each 32-bit lane; of the places in both halves five bits count, any fifth bit.
    const __m512i wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i places =
        HighFirst ? _mm512_or_si512(_mm512_srli_epi32(wide, 4), _mm512_slli_epi32(wide, 16))
                  : _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
    return _mm512_permutexvar_epi16(places, table);
  }
  /// Elements of 16 bits for the 64 nibbles of 32 bytes: those of even columns, and of odd ones.
  /// Two tables are one vector, for 32 columns each; one table stands there twice.
  template <bool HighFirst, bool TwoTables>
  [[gnu::always_inline]] static void nibble_columns(__m256i bytes, __m512i table,
                                                    __m512i (&words)[2]) {
    __m512i low = _mm512_cvtepu8_epi16(bytes);
    __m512i high = _mm512_srli_epi16(low, 4);
    if constexpr (TwoTables) {
      const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
      low = _mm512_ternarylogic_epi32(low, _mm512_set1_epi16(15), upper, 0xea);  // low & 15 | upper
      high = _mm512_or_si512(high, upper);
    }
    words[0] = _mm512_permutexvar_epi16(HighFirst ? high : low, table);
    words[1] = _mm512_permutexvar_epi16(HighFirst ? low : high, table);
  }
  static __m256i load_nibbles(const std::uint8_t* bytes) { return _mm256_loadu_si256(half(bytes)); }
  /// The same in the order of the columns, with one table.
  template <bool HighFirst>
  [[gnu::always_inline]] static void nibble_words(const std::uint8_t* bytes, __m512i table,
                                                  __m512i (&words)[2]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i columns[2];
    nibble_columns<HighFirst, false>(_mm256_permutevar8x32_epi32(load_nibbles(bytes), order), table,
                                     columns);
    words[0] = _mm512_unpacklo_epi16(columns[0], columns[1]);
    words[1] = _mm512_unpackhi_epi16(columns[0], columns[1]);
  }
  /// The lower half of one table and the upper half of another, each of which stands there twice.
  static __m512i join_tables(__m512i first, __m512i second) {
    return _mm512_mask_mov_epi64(first, 0xf0, second);
  }

  template <bool HighFirst, class T>
  [[gnu::always_inline]] static void look_up_nibbles(const std::uint8_t* bytes, __m512i table,
                                                     T* out) {
    if constexpr (sizeof(T) == 2) {
      _mm512_storeu_si512(out, nibble_words<HighFirst>(bytes, table));
    } else {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i wide =
            _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8 * i)));
        const __m512i pairs =
            HighFirst ? _mm512_or_si512(_mm512_srli_epi64(wide, 4), _mm512_slli_epi64(wide, 32))
                      : _mm512_or_si512(wide, _mm512_slli_epi64(wide, 28));
        const __m512i places = _mm512_and_si512(pairs, _mm512_set1_epi32(15));
        store(out + 16 * i, _mm512_permutexvar_ps(places, _mm512_castsi512_ps(table)));
      }
    }
  }

  static constexpr bool kLooksUpFp8 = true;
  /// Of the table of kFp8Values for look_up_fp8: all 128 values without their sign.
  struct Fp8Table {
    __m512i quarters[4];
    explicit Fp8Table(__m512i all) {
      const __m512i place = _mm512_set_epi64(
          0x0007000600050004, 0x0003000200010000, 0x0007000600050004, 0x0003000200010000,
          0x0007000600050004, 0x0003000200010000, 0x0007000600050004, 0x0003000200010000);
      const __m512i exponent =
          _mm512_set_epi64(0x0180018001800180, 0x0180018001800180, 0x0100010001000100,
                           0x0100010001000100, 0x0080008000800080, 0x0080008000800080, 0, 0);
      const __m512i normal = _mm512_add_epi16(_mm512_permutexvar_epi16(place, all), exponent);
      quarters[0] = _mm512_mask_permutexvar_epi16(
          normal, 0xff, _mm512_or_si512(place, _mm512_set1_epi16(8)), all);
      quarters[1] = _mm512_add_epi16(normal, _mm512_set1_epi16(0x200));
      quarters[2] = _mm512_add_epi16(normal, _mm512_set1_epi16(0x400));
      quarters[3] = _mm512_mask_mov_epi16(_mm512_add_epi16(normal, _mm512_set1_epi16(0x600)),
                                          1u << 31, _mm512_set1_epi16(0x7fff));
    }
  };
  /// 32 values.
  [[gnu::always_inline]] static __m512i fp8_words(const std::uint8_t* bytes,
                                                  const Fp8Table& table) {
    const __m512i words =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
    // An index has six bits; the seventh chooses between the results.
    const __m512i low = _mm512_permutex2var_epi16(table.quarters[0], words, table.quarters[1]);
    const __m512i high = _mm512_permutex2var_epi16(table.quarters[2], words, table.quarters[3]);
    const __mmask32 upper = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x40));
    const __m512i value = _mm512_mask_mov_epi16(low, upper, high);
    // value ^ (words & sign): the byte was extended with its sign.
    return _mm512_ternarylogic_epi32(value, words, _mm512_set1_epi16(-32768), 0x78);
  }
  [[gnu::always_inline]] static void look_up_fp8(const std::uint8_t* bytes, const Fp8Table& table,
                                                 Bf16* out) {
    _mm512_storeu_si512(out, fp8_words(bytes, table));
  }

  /// The same table as bytes, in memory: the low ones of all 128 values, then the high ones.
  static constexpr std::int64_t kFp8TableBytes = 256;
  static void store_fp8_bytes(const Fp8Table& table, std::uint8_t* at) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i words = table.quarters[i];
      _mm256_storeu_si256(half(at + 32 * i), _mm512_cvtepi16_epi8(words));
      _mm256_storeu_si256(half(at + 128 + 32 * i),
                          _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
    }
  }
  struct Fp8Bytes {
    __m512i low[2], high[2];
    explicit Fp8Bytes(const std::uint8_t* at)
        : low{_mm512_loadu_si512(at), _mm512_loadu_si512(at + 64)},
          high{_mm512_loadu_si512(at + 128), _mm512_loadu_si512(at + 192)} {}
  };
  /// Each byte's lower seven bits are a place in the 128 bytes. vpermi2b is of AVX512-VBMI, which
  /// not every machine has that runs this file: so the compiler is not told of it.
  [[gnu::always_inline]] static __m512i look_up_bytes(__m512i places, __m512i lower,
                                                      __m512i upper) {
    asm("vpermi2b %2, %1, %0" : "+v"(places) : "v"(lower), "v"(upper));
    return places;
  }
  /// 64 values. Low and high bytes are looked up apart: four shuffles and one that makes up for the
  /// order in which they are joined, where 32 values at a time take six.
  [[gnu::always_inline]] static void fp8_words(const std::uint8_t* bytes, const Fp8Bytes& table,
                                               __m512i (&words)[2]) {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i places = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(bytes));
    const __m512i low = look_up_bytes(places, table.low[0], table.low[1]);
    const __m512i magnitude = look_up_bytes(places, table.high[0], table.high[1]);
    // magnitude ^ (places & sign)
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, places, _mm512_set1_epi8(-128), 0x78);
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }

  /// Sixteen bf16 to look up as floats.
  using NibbleFloats = Vec;
  static Vec stored_nibbles(const PackedWeights& w, std::int64_t table) {
    return load(static_cast<const Bf16*>(w.tables) + kTableElems * table);
  }
  /// Of a scale of bf16, which is added to all but element 8, which is zero.
  static Vec shifted_nibbles(const PackedWeights& w, const std::uint16_t* bits) {
    const __m256i table =
        _mm256_loadu_si256(half(static_cast<const Bf16*>(w.tables) + kTableElems * (*bits & 0xff)));
    return widen_bf16(
        _mm256_mask_add_epi16(table, 0xfeff, table, _mm256_set1_epi16(static_cast<short>(*bits))));
  }
  /// bf16(values * scale), whose scale is finite.
  static Vec made_nibbles(const float* values, float scale) {
    const __m512i bits = _mm512_castps_si512(mul(load(values), broadcast(scale)));
    const __m512i tie_to_even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(tie_to_even, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(~0xffff)));
  }
  /// 64 nibbles as floats, as Dot<Bf16> loads 64 elements: of each 32 columns the even ones, then
  /// the odd ones. The first 32 have one table, the others another.
  template <bool HighFirst>
  [[gnu::always_inline]] static void nibble_floats(const std::uint8_t* bytes, Vec first, Vec second,
                                                   Vec (&w)[4]) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      // Of a place in sixteen floats four bits count.
      const __m512i low =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i)));
      const __m512i high = _mm512_srli_epi32(low, 4);
      const Vec table = i == 0 ? first : second;
      w[2 * i] = _mm512_permutexvar_ps(HighFirst ? high : low, table);
      w[2 * i + 1] = _mm512_permutexvar_ps(HighFirst ? low : high, table);
    }
  }
  /// The same of 64 values of fp8. `table` is that of store_fp8_places.
  [[gnu::always_inline]] static void fp8_floats(const std::uint8_t* bytes,
                                                const std::uint8_t* table, Vec (&w)[4]) {
    const auto load_table = [table](int i) {
      return _mm512_broadcast_i32x4(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16 * i)));
    };
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i packed = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(bytes));
    const __m512i places = _mm512_and_si512(packed, _mm512_set1_epi8(15));
    const __m512i exponent = _mm512_and_si512(packed, _mm512_set1_epi8(0x70));
    const __mmask64 small = _mm512_testn_epi8_mask(exponent, exponent);
    const __mmask64 nan = _mm512_cmpeq_epi8_mask(_mm512_and_si512(packed, _mm512_set1_epi8(0x7f)),
                                                 _mm512_set1_epi8(0x7f));
    const __m512i lows = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(load_table(0), places), small,
                                                  load_table(2), places);
    const __m512i highs = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(load_table(1), places),
                                                   small, load_table(3), places);
    const __m512i shifted = _mm512_mask_mov_epi8(
        _mm512_add_epi8(highs, _mm512_srli_epi16(exponent, 4)), nan, _mm512_set1_epi8(0x7f));
    // shifted ^ (packed & sign)
    const __m512i upper = _mm512_ternarylogic_epi32(shifted, packed, _mm512_set1_epi8(-128), 0x78);
    const __m512i lower = _mm512_mask_mov_epi8(lows, nan, _mm512_set1_epi8(-1));
    const __m512i words[2] = {_mm512_unpacklo_epi8(lower, upper),
                              _mm512_unpackhi_epi8(lower, upper)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      w[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(words[i], 16));
      w[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(words[i], _mm512_set1_epi32(~0xffff)));
    }
  }
  /// Sums of columns in that order into the order of the columns.
  [[gnu::always_inline]] static void join_columns(Vec& even, Vec& odd) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const Vec first = _mm512_permutex2var_ps(even, low, odd);
    odd = _mm512_permutex2var_ps(even, high, odd);
    even = first;
  }

  static float widen_half(std::uint16_t bits) { return _cvtsh_ss(bits); }
  /// Two vectors of values. As fp16 the same bits are 2^-8 times as much.
  [[gnu::always_inline]] static void load_e4m3(const std::uint8_t* bytes, Vec (&values)[2]) {
    // Extended with its sign, a byte has that in the upper of nine bits after the shift.
    const __m512i shifted =
        _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(half(bytes))), 7);
    const __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0xbf80)));
    const __m512i magnitude = _mm512_and_si512(shifted, _mm512_set1_epi16(0x3f80));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3f80));
    const __m512i all = _mm512_mask_mov_epi16(halves, nan, _mm512_set1_epi16(0x7e00));
    values[0] = mul(_mm512_cvtph_ps(_mm512_castsi512_si256(all)), broadcast(256.0f));
    values[1] = mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(all, 1)), broadcast(256.0f));
  }

  /// One 64-byte line of rounded sums, written around the caches; `at` starts the line.
  static void stream_line(float* at, const float* sums) { _mm512_stream_ps(at, load(sums)); }
  static void stream_line(Bf16* at, const float* sums) {
    stream_halves(at, round_bf16(load(sums)), round_bf16(load(sums + 16)));
  }
  static void stream_line(Fp16* at, const float* sums) {
    stream_halves(at, round_fp16(load(sums)), round_fp16(load(sums + 16)));
  }
  static void stream_fence() { _mm_sfence(); }

  /// The sums over the lanes of four vectors.
  static Quad reduce4(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d abd = _mm512_castps_pd(ab);
    const __m512d cdd = _mm512_castps_pd(cd);
    const Vec abcd = add(_mm512_castpd_ps(_mm512_unpacklo_pd(abd, cdd)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(abd, cdd)));
    const __m256 halves =
        _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }
  static void store_quad(float* at, Quad v) { _mm_storeu_ps(at, v); }

  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

  static Vec widen_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m256i round_fp16(Vec v) { return _mm512_cvtps_ph(v, kNearest); }
  static __m256i round_bf16(Vec v) {
#ifdef __AVX512BF16__
    // Flushes denormals (below 1.2e-38) to zero, as the products of this instruction set do.
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    return round_bf16_bits(v);
#endif
  }
  static __m256i round_bf16_bits(Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i tie_to_even = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(tie_to_even, _mm512_set1_epi32(0x7fff))), 16);
    // Rounding could carry a NaN into Inf or zero.
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
  }
  /// Far from where products of small numbers are denormal or infinite.
  static bool is_moderate(float scale) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &scale, sizeof(bits));
    return ((bits & 0x7fffffffu) - (27u << 23)) < (200u << 23);  // 2^-100 to 2^100
  }
  static void stream_halves(void* at, __m256i low, __m256i high) {
    _mm512_stream_si512(static_cast<__m512i*>(at),
                        _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }

  template <class T>
  static const __m256i* half(const T* at) {
    return reinterpret_cast<const __m256i*>(at);
  }
  template <class T>
  static __m256i* half(T* at) {
    return reinterpret_cast<__m256i*>(at);
  }

  template <class T>
  struct Dot : WidenedDot<Avx512, T> {};
};

#ifndef __AVX512BF16__
/// 32 bf16 of one line, the even ones in one pass and the odd ones in another: a shift or a mask
/// makes floats of them.
template <>
struct Avx512::Dot<Bf16> {
  using Vec = __m512;
  using Reg = __m512;
  static constexpr std::int64_t kStep = 32;
  static constexpr int kPasses = 2;
  template <int Pass>
  static Reg load(const Bf16* at) {
    return split<Pass>(_mm512_loadu_si512(at));
  }
  template <int Pass>
  static Reg load_partial(const Bf16* at, std::int64_t count) {
    const __mmask32 mask = static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
    return split<Pass>(_mm512_maskz_loadu_epi16(mask, at));
  }
  static Vec accumulate(Vec acc, Reg a, Reg b) { return _mm512_fmadd_ps(a, b, acc); }

  template <int Pass>
  static Reg split(__m512i pairs) {
    if constexpr (Pass == 0) return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
  }
};
#endif

}  // namespace
}  // namespace moegemm::cpu::simd
