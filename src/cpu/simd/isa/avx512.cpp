#include "cpu/simd/kernel_table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "cpu/simd/isa/avx512_vectors.h"
#include "cpu/simd/kernels/decoded/floats.h"

namespace moegemm::cpu::simd {

const KernelTable* avx512_kernels() {
  static constexpr KernelTable kTable = float_kernel_table<Avx512>();
  return &kTable;
}

}  // namespace moegemm::cpu::simd
#else
namespace moegemm::cpu::simd {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace moegemm::cpu::simd
#endif
