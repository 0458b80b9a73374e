#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/isa/instruction_set.h"
#include "cpu/simd/packed_weights.h"

namespace moegemm::cpu {

void CpuPasses::dequantise(const TensorView& packed, const void* scales,
                           const Quantization& quantization, const TensorView& out,
                           const ExecutionContext& context) const {
  const std::int64_t experts = out.shape[0], n = out.shape[1], k = out.shape[2];
  constexpr std::int64_t kGrainElements = 32 * 1024;
  const std::int64_t grain = (kGrainElements + k - 1) / k;
  const std::int64_t row_bytes = k * size_bytes(out.dtype);
  const simd::DecodeFn decode =
      simd::kernels_for(simd::kernels_of(simd::active_instruction_set()), out.dtype).decode;
  for_each_range(context, experts * n, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end;) {
      const std::int64_t expert = row / n;
      const std::int64_t rows = std::min((expert + 1) * n, end) - row;
      const simd::PackedWeights w =
          simd::packed_weights(quantization, out.dtype, packed.data, scales, expert, n, k);
      decode(w, row - expert * n, rows, static_cast<std::byte*>(out.data) + row * row_bytes);
      row += rows;
    }
  });
}

}  // namespace moegemm::cpu
