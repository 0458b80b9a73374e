#include "cpu/simd/kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "cpu/simd/kernels/element.h"
#include "cpu/simd/kernels/table.h"

/// AVX2 with FMA and F16C: every x86 core of the last ten years.
namespace moegemm::cpu::simd {
namespace {

struct Avx2 {
  using Vec = __m256;
  using Quad = __m128;
  static constexpr std::int64_t kLanes = 8;
  // 16 registers. 3 x 4 dot: 12 accumulators, 3 of X, 1 of W. 6 x 2 broadcast: 12 + 2 + 1.
  static constexpr int kDotRows = 3;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 2;
  static constexpr int kOuterRows = 4;
  static constexpr int kOuterVecs = 2;
  static constexpr bool kStreams = false;
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec broadcast(float value) { return _mm256_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  // Inlined by force: GCC takes a function that only prefetches for one without effect and drops
  // the call.
  [[gnu::always_inline]] static void prefetch_write(const void* at) {
    __builtin_prefetch(at, 1, 2);
  }
  [[gnu::always_inline]] static void prefetch_l1(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }
  [[gnu::always_inline]] static void prefetch_l2(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
  }

  static Vec load(const float* at) { return _mm256_loadu_ps(at); }
  static Vec load(const Bf16* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(at)), 16));
  }
  static Vec load(const Fp16* at) { return _mm256_cvtph_ps(load_half(at)); }
  template <class T>
  static Vec load_partial(const T* at, std::int64_t count) {
    T whole[kLanes] = {};
    for (std::int64_t i = 0; i < count; ++i) whole[i] = at[i];
    return load(whole);
  }

  static void store(float* at, Vec v) { _mm256_storeu_ps(at, v); }
  static void store(Bf16* at, Vec v) { store_half(at, round_bf16(v)); }
  static void store(Fp16* at, Vec v) { store_half(at, _mm256_cvtps_ph(v, kNearest)); }
  template <class T>
  static void store_partial(T* at, Vec v, std::int64_t count) {
    T whole[kLanes];
    store(whole, v);
    for (std::int64_t i = 0; i < count; ++i) at[i] = whole[i];
  }
  static void stream_fence() {}

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
  static Quad load_quad(const float* at) { return _mm_loadu_ps(at); }
  static Quad scale_quad(Quad v, float factor) { return _mm_mul_ps(v, _mm_set1_ps(factor)); }
  static void store_quad(float* at, Quad v) { _mm_storeu_ps(at, v); }
  static void store_quad(Bf16* at, Quad v) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), round_bf16(_mm256_set_m128(v, v)));
  }
  static void store_quad(Fp16* at, Quad v) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_cvtps_ph(v, kNearest));
  }

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

  /// Steps of the forward kernel: floats as they are, fp16 widened.
  template <class T>
  struct Dot {
    using Reg = Vec;
    static constexpr std::int64_t kStep = kLanes;
    static constexpr int kPasses = 1;
    template <int Pass>
    static Reg load(const T* at) {
      return Avx2::load(at);
    }
    template <int Pass>
    static Reg load_partial(const T* at, std::int64_t count) {
      return Avx2::load_partial(at, count);
    }
    static Vec accumulate(Vec acc, Reg a, Reg b) { return fma(a, b, acc); }
  };
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
