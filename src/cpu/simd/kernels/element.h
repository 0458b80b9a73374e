#pragma once

#include "cpu/element_type.h"

namespace moegemm::cpu::simd {

/// Bare bits: every instruction set brings its own conversions. Those of element_type.h are inline
/// functions, of which the linker keeps one copy: compiled with a file's instructions, it would run
/// on machines that lack them.
using Bf16 = BFloat16;
using Fp16 = Float16;

}  // namespace moegemm::cpu::simd
