#include "cpu/simd/kernel_table.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#include "cpu/simd/isa/avx512_vectors.h"
#include "cpu/simd/kernels/decoded_registers.h"
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

  /// Sums whose columns come as 64 even ones and 64 odd ones, each interleaved like two weight
  /// rows, into the order of load_in_place.
  template <int Rows>
  [[gnu::always_inline]] static void join_columns(Vec (&acc)[Rows][4]) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const auto join = [](Vec a, __m512i order, Vec b) {
      return _mm512_castpd_ps(
          _mm512_permutex2var_pd(_mm512_castps_pd(a), order, _mm512_castps_pd(b)));
    };
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      // Of each 16 columns: 0-3 and 4-7, 8-11 and 12-15.
      const Vec a = _mm512_unpacklo_ps(acc[i][0], acc[i][2]);
      const Vec b = _mm512_unpackhi_ps(acc[i][0], acc[i][2]);
      const Vec c = _mm512_unpacklo_ps(acc[i][1], acc[i][3]);
      const Vec d = _mm512_unpackhi_ps(acc[i][1], acc[i][3]);
      acc[i][0] = join(a, low, c);
      acc[i][1] = join(b, low, d);
      acc[i][2] = join(a, high, c);
      acc[i][3] = join(b, high, d);
    }
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

}  // namespace

const KernelTable* avx512bf16_kernels() {
  static constexpr KernelTable kTable = [] {
    KernelTable table = kernel_table<Avx512, Bf16PairMath>();
    DTypeKernels& bf16 = table.formats[0];
    bf16.forward = decoded_forward_task<Avx512>;
    bf16.dx_in_place = dx_in_place<Bf16PairMath, Bf16, DecodedInRegisters<Bf16PairMath>>;
    return table;
  }();
  return &kTable;
}

}  // namespace moegemm::cpu::simd
#else
namespace moegemm::cpu::simd {
const KernelTable* avx512bf16_kernels() { return nullptr; }
}  // namespace moegemm::cpu::simd
#endif
