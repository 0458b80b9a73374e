#include <cstdint>

#include "cpu/element_type.h"
#include "cpu/simd/isa/shared.h"
#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/element.h"
#include "cpu/simd/kernels/table.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

/// The compiler's own vectors of 16 bytes: SSE2 on x86, NEON on Arm, whatever it makes of them
/// elsewhere.
namespace moegemm::cpu::simd {
namespace {

struct Portable : Prefetches, CopiedParts<Portable> {
  using Vec = float __attribute__((vector_size(16)));
  using Bits = std::uint32_t __attribute__((vector_size(16)));
  using Ints = std::int32_t __attribute__((vector_size(16)));
  using Quad = Vec;
  static constexpr std::int64_t kLanes = 4;
  // 16 registers at least, as AVX2.
  static constexpr bool kFewRegisters = true;
  static constexpr int kDotRows = 3;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 2;
  static constexpr int kOuterRows = 4;
  static constexpr int kOuterVecs = 2;

  static Vec zero() { return Vec{}; }
  static Vec broadcast(float value) { return Vec{value, value, value, value}; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  /// Fused only where an instruction exists: emulating it costs more than the rounding.
  static Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
  }

  static Vec load(const float* at) {
    Vec v;
    __builtin_memcpy(&v, at, sizeof(v));
    return v;
  }
  static Vec load(const Bf16* at) { return as_floats(load_bits(at) << 16); }
  static Vec load(const Fp16* at) {
    const Bits bits = load_bits(at);
    const Bits sign = (bits & 0x8000u) << 16;
    const Bits shifted = (bits & 0x7fffu) << 13;
    // Exponents differ by 112; the product is exact and makes normal numbers of denormals.
    const Vec scaled = as_floats(shifted) * broadcast(0x1p112f);
    const Bits special = (bits & 0x7fffu) >= 0x7c00u;  // Inf, NaN: all exponent bits of float
    const Bits magnitude = (special & (shifted | 0x7f800000u)) | (~special & as_bits(scaled));
    return as_floats(sign | magnitude);
  }

  static void store(float* at, Vec v) { __builtin_memcpy(at, &v, sizeof(v)); }
  static void store(Bf16* at, Vec v) {
    const Bits bits = as_bits(v);
    const Bits top = bits >> 16;
    const Bits rounded = (bits + 0x7fffu + (top & 1u)) >> 16;
    // Rounding could carry a NaN into Inf or zero.
    const Bits nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const Bits words = (nan & (top | 0x40u)) | (~nan & rounded);
    for (std::int64_t i = 0; i < kLanes; ++i) at[i].bits = static_cast<std::uint16_t>(words[i]);
  }
  static void store(Fp16* at, Vec v) {
    for (std::int64_t i = 0; i < kLanes; ++i) at[i].bits = to_float16(v[i]).bits;
  }

  template <class T>
  static void store_exact(T* at, Vec v) {
    store(at, v);
  }
  template <class T>
  struct TableOf {
    T at[16];
  };
  template <class T>
  static TableOf<T> load_table(const T* table) {
    TableOf<T> result;
    __builtin_memcpy(&result, table, sizeof(result));
    return result;
  }
  template <class T>
  static TableOf<T> make_table(const float* values, float scale) {
    TableOf<T> table;
    for (int i = 0; i < 16; i += 4) store(table.at + i, load(values + i) * broadcast(scale));
    return table;
  }
  static constexpr bool kShiftsTables = false;
  template <bool HighFirst, class T>
  static void look_up_nibbles(const std::uint8_t* bytes, const TableOf<T>& table, T* out) {
    const int first = HighFirst ? 4 : 0;
    for (std::int64_t i = 0; i < 16; ++i) {
      out[2 * i] = table.at[(bytes[i] >> first) & 15];
      out[2 * i + 1] = table.at[(bytes[i] >> (4 - first)) & 15];
    }
  }
  static constexpr bool kLooksUpFp8 = false;
  static float widen_half(std::uint16_t bits) { return half_to_float(bits); }
  static void load_e4m3(const std::uint8_t* bytes, Vec (&values)[2]) {
    values[0] = four_e4m3(bytes);
    values[1] = four_e4m3(bytes + 4);
  }
  static Vec four_e4m3(const std::uint8_t* bytes) {
    const Bits bits = {bytes[0], bytes[1], bytes[2], bytes[3]};
    const Bits magnitude = bits & 0x7fu;
    // Normal numbers by their bits (120 is the difference of the biases), denormals as integers.
    const Bits normal = (magnitude << 20) + (120u << 23);
    const Vec denormal = __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Vec) * 0x1p-9f;
    const Bits is_denormal = reinterpret_cast<Bits>(magnitude < 8u);
    const Bits is_nan = reinterpret_cast<Bits>(magnitude == 0x7fu);
    const Bits finite = (is_denormal & as_bits(denormal)) | (~is_denormal & normal);
    return as_floats((bits & 0x80u) << 24 | (is_nan & 0x7fc00000u) | (~is_nan & finite));
  }

  /// The sums over the lanes of four vectors.
  static Quad reduce4(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab =
        __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Vec cd =
        __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  }
  static void store_quad(float* at, Quad v) { store(at, v); }

  static Vec as_floats(Bits bits) { return reinterpret_cast<Vec>(bits); }
  static Bits as_bits(Vec v) { return reinterpret_cast<Bits>(v); }
  template <class T>
  static Bits load_bits(const T* at) {
    return Bits{at[0].bits, at[1].bits, at[2].bits, at[3].bits};
  }

  template <class T>
  struct Dot : WidenedDot<Portable, T> {};
};

}  // namespace

const KernelTable* portable_kernels() {
  static constexpr KernelTable kTable = kernel_table<Portable>();
  return &kTable;
}

}  // namespace moegemm::cpu::simd
