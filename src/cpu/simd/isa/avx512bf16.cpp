#include "cpu/simd/kernel_table.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#include "cpu/simd/isa/avx512_vectors.h"
#include "cpu/simd/kernels/decoded/products.h"
#include "cpu/simd/kernels/table.h"

/// AVX-512 with vdpbf16ps, which multiplies pairs of bf16 and adds both products to a float:
/// acc + high * high, rounded, then + low * low, rounded. It treats denormal inputs, products and
/// sums as zero whatever the thread's floating-point mode, so numbers below 1.2e-38 vanish.
namespace moegemm::cpu::simd {
namespace {

template <>
struct Avx512::Dot<Bf16> {
  using Reg = __m512bh;
  static constexpr std::int64_t kStep = 32;
  static constexpr int kPasses = 1;
  template <int Pass>
  static Reg load(const Bf16* at) {
    return (__m512bh)_mm512_loadu_si512(at);
  }
  template <int Pass>
  static Reg load_partial(const Bf16* at, std::int64_t count) {
    const __mmask32 mask = static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, at);
  }
  static Vec accumulate(Vec acc, Reg a, Reg b) { return _mm512_dpbf16_ps(acc, a, b); }
};

/// Broadcast kernels over pairs of bf16: term 2s in the low half of word s, term 2s + 1 in the
/// high.
struct Bf16PairMath {
  using Isa = Avx512;
  using Word = std::uint32_t;
  using Stored = Bf16;
  using Vec = Isa::Vec;
  using Step = __m512bh;
  static constexpr std::int64_t kTerms = 2;

  static Step broadcast(const Word* word) {
    int pair;  // rows of odd length put words at 2-byte addresses
    __builtin_memcpy(&pair, word, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Step load_step(const Word* words) { return (__m512bh)_mm512_loadu_si512(words); }
  static Vec accumulate(Vec acc, Step a, Step b) { return _mm512_dpbf16_ps(acc, a, b); }

  /// `second` null: a row of zeros.
  template <class T, int Vecs>
  static void pack_step(const T* first, const T* second, std::int64_t valid, const float*,
                        Word* words) {
    if (Vecs % 2 == 0 && second != nullptr && valid == Vecs * Isa::kLanes) {
      const __m512i low = interleave_indices(0);
      const __m512i high = interleave_indices(16);
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; j += 2) {
        const __m512i a = _mm512_loadu_si512(first + j * Isa::kLanes);
        const __m512i b = _mm512_loadu_si512(second + j * Isa::kLanes);
        _mm512_storeu_si512(words + j * Isa::kLanes, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(words + (j + 1) * Isa::kLanes, _mm512_permutex2var_epi16(a, high, b));
      }
      return;
    }
    for (int j = 0; j < Vecs; ++j) {
      std::int64_t count = valid - j * Isa::kLanes;
      count = count < 0 ? 0 : count > Isa::kLanes ? Isa::kLanes : count;
      const __mmask16 mask = Isa::first(count);
      const __m512i a =
          _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first + j * Isa::kLanes));
      const __m512i b =
          second == nullptr
              ? _mm512_setzero_si512()
              : _mm512_slli_epi32(
                    _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, second + j * Isa::kLanes)),
                    16);
      _mm512_storeu_si512(words + j * Isa::kLanes, _mm512_or_si512(a, b));
    }
  }

  /// Two weight rows, interleaved within 128-bit lanes: cheaper than in order, and
  /// restore_column_order puts the sums right at the end.
  template <class T, bool Masked>
  static void load_in_place(Step (&b)[2], const T* first, const T* second, std::int64_t col,
                            std::int64_t valid) {
    __mmask32 mask = ~__mmask32{0};
    if constexpr (Masked) {
      const std::int64_t count = valid - col < 0 ? 0 : valid - col > 32 ? 32 : valid - col;
      mask = static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
    }
    const auto load = [=](const T* row) {
      if constexpr (Masked) return _mm512_maskz_loadu_epi16(mask, row + col);
      return _mm512_loadu_si512(row + col);
    };
    interleave(b, load(first), second != nullptr ? load(second) : _mm512_setzero_si512());
  }
  [[gnu::always_inline]] static void interleave(Step* b, __m512i lower, __m512i upper) {
    b[0] = (__m512bh)_mm512_unpacklo_epi16(lower, upper);
    b[1] = (__m512bh)_mm512_unpackhi_epi16(lower, upper);
  }

  /// Of each 32 columns load_in_place puts 0-3, 8-11, 16-19, 24-27 in one vector, the rest in the
  /// next.
  template <int Vecs>
  static void restore_column_order(float* sums) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int j = 0; j < Vecs; j += 2) {
      float* pair = sums + j * Isa::kLanes;
      const Vec a = Isa::load(pair);
      const Vec b = Isa::load(pair + Isa::kLanes);
      Isa::store(pair, _mm512_permutex2var_ps(a, low, b));
      Isa::store(pair + Isa::kLanes, _mm512_permutex2var_ps(a, high, b));
    }
  }

  template <class T>
  static void copy_words(const T* row, std::int64_t terms, Word* words) {
    words[(terms - 1) / 2] = 0;
    __builtin_memcpy(words, row, static_cast<std::size_t>(terms) * sizeof(T));
  }

  static __m512i interleave_indices(short from) {
    const __m512i words =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_add_epi16(words, _mm512_set1_epi16(from));
  }
};

/// Decoded weights as bf16, in order for forward.
struct WordUnit {
  using Isa = Avx512;
  using Element = Bf16;
  static constexpr int kVecs = 2;
  using Columns = Isa::Words[kVecs];
  static constexpr bool kReadsBlocks = false;

  [[gnu::always_inline]] static Isa::Vec accumulate(Isa::Vec acc, const Bf16* x, Isa::Words w) {
    return _mm512_dpbf16_ps(acc, Isa::Dot<Bf16>::load<0>(x), (__m512bh)w);
  }
  static void pack_row(const Bf16* row, std::int64_t count, std::int64_t rows, Bf16* out) {
    for (std::int64_t k = 0; k < count; k += 32, out += 32 * rows) {
      _mm512_storeu_si512(out, _mm512_loadu_si512(row + k));
    }
  }
  static Isa::Words stored(const PackedWeights& w, std::int64_t table) {
    return Isa::load_table(static_cast<const Bf16*>(w.tables) + kTableElems * table);
  }
  static Isa::Words shifted(const PackedWeights& w, const std::uint16_t* bits) {
    return Isa::shift_table(static_cast<const Bf16*>(w.tables) + kTableElems * (*bits & 0xff),
                            bits);
  }
  static Isa::Words made(const float* values, float scale) {
    return Isa::make_table<Bf16>(values, scale);
  }
  /// The tables of two neighbouring scales in one vector.
  static constexpr bool kJoinsTables = true;
  static Isa::Words shifted_pair(const PackedWeights& w, const std::uint16_t* bits) {
    const Bf16* const tables = static_cast<const Bf16*>(w.tables);
    return Isa::shift_tables(tables + kTableElems * (bits[0] & 0xff),
                             tables + kTableElems * (bits[1] & 0xff), bits);
  }
  template <bool HighFirst>
  [[gnu::always_inline]] static void joined_nibbles(const std::uint8_t* bytes, Isa::Words tables,
                                                    Columns& to) {
    Isa::nibble_columns<HighFirst, true>(Isa::load_nibbles(bytes), tables, to);
  }
  template <bool HighFirst, bool InOrder, bool TwoTables>
  [[gnu::always_inline]] static void nibbles(const std::uint8_t* bytes, Isa::Words first,
                                             Isa::Words second, Columns& to) {
    if constexpr (!InOrder && TwoTables) {
      joined_nibbles<HighFirst>(bytes, Isa::join_tables(first, second), to);
    } else if constexpr (!InOrder) {
      Isa::nibble_columns<HighFirst, false>(Isa::load_nibbles(bytes), first, to);
    } else if constexpr (TwoTables) {
      to[0] = Isa::nibble_words<HighFirst>(bytes, first);
      to[1] = Isa::nibble_words<HighFirst>(bytes + 16, second);
    } else {
      Isa::nibble_words<HighFirst>(bytes, first, to);
    }
  }

  static constexpr bool kFp8EvensFirst = false;
  static bool reads_fp8(const PackedWeights& w) { return w.byte_lookups; }
  static constexpr std::int64_t kFp8TableBytes = Isa::kFp8TableBytes;
  static void store_fp8_table(float scale, std::uint8_t* at) {
    Isa::store_fp8_bytes(Isa::Fp8Table(Isa::make_table<Bf16>(kFp8Values, scale)), at);
  }
  [[gnu::always_inline]] static void fp8(const std::uint8_t* bytes, const std::uint8_t* table,
                                         Columns& to) {
    Isa::fp8_words(bytes, Isa::Fp8Bytes(table), to);
  }

  /// Sums whose columns come as 64 even ones and 64 odd ones, each interleaved like two weight
  /// rows, into the order of load_in_place.
  [[gnu::always_inline]] static void join_columns(Isa::Vec (&sums)[4]) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const auto join = [](Isa::Vec a, __m512i order, Isa::Vec b) {
      return _mm512_castpd_ps(
          _mm512_permutex2var_pd(_mm512_castps_pd(a), order, _mm512_castps_pd(b)));
    };
    // Of each 16 columns: 0-3 and 4-7, 8-11 and 12-15.
    const Isa::Vec a = _mm512_unpacklo_ps(sums[0], sums[2]);
    const Isa::Vec b = _mm512_unpackhi_ps(sums[0], sums[2]);
    const Isa::Vec c = _mm512_unpacklo_ps(sums[1], sums[3]);
    const Isa::Vec d = _mm512_unpackhi_ps(sums[1], sums[3]);
    sums[0] = join(a, low, c);
    sums[1] = join(b, low, d);
    sums[2] = join(a, high, c);
    sums[3] = join(b, high, d);
  }
};

}  // namespace

const KernelTable* avx512bf16_kernels() {
  static constexpr KernelTable kTable =
      with_decoded_registers<WordUnit, Bf16PairMath>(kernel_table<Avx512, Bf16PairMath>());
  return &kTable;
}

}  // namespace moegemm::cpu::simd
#else
namespace moegemm::cpu::simd {
const KernelTable* avx512bf16_kernels() { return nullptr; }
}  // namespace moegemm::cpu::simd
#endif
