#pragma once

#include <cstdint>

namespace moegemm::cpu::simd {

/// Storage of the two 16-bit formats. Bare bits: every instruction set brings its own conversions.
struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

}  // namespace moegemm::cpu::simd
