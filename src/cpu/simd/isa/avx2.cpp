#include "cpu/simd/kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "cpu/simd/isa/shared.h"
#include "cpu/simd/kernels/element.h"
#include "cpu/simd/kernels/table.h"

/// AVX2 with FMA and F16C: every x86 core of the last ten years.
namespace moegemm::cpu::simd {
namespace {

struct Avx2 : Prefetches, CopiedParts<Avx2> {
  using Vec = __m256;
  using Quad = __m128;
  static constexpr std::int64_t kLanes = 8;
  // 16 registers. 3 x 4 dot: 12 accumulators, 3 of X, 1 of W. 6 x 2 broadcast: 12 + 2 + 1.
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
  static constexpr KernelTable kTable = kernel_table<Avx2>();
  return &kTable;
}

}  // namespace moegemm::cpu::simd
#else
namespace moegemm::cpu::simd {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace moegemm::cpu::simd
#endif
