#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/isa/instruction_set.h"
#include "cpu/simd/packed_weights.h"

namespace moegemm::cpu {

void CpuPasses::dequantise(const TensorView& packed, const void* scales,
                           const Quantization& quantization, std::int64_t first_row,
                           std::int64_t first_column, const TensorView& out,
                           const ExecutionContext& context) const {
  const std::int64_t n = packed.shape[1], k = packed.shape[2];
  const std::int64_t experts = out.shape[0], out_rows = out.shape[1], columns = out.shape[2];
  constexpr std::int64_t kGrainElements = 32 * 1024;
  const std::int64_t grain = (kGrainElements + k - 1) / k;
  const std::int64_t element = size_bytes(out.dtype);
  const simd::DecodeFn decode =
      simd::kernels_for(simd::kernels_of(simd::active_instruction_set()), out.dtype).decode;
  for_each_range(context, experts * out_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::byte> whole(columns == k ? 0 : k * element);  // rows are decoded as they are
    for (std::int64_t row = begin; row < end;) {
      const std::int64_t expert = row / out_rows;
      const std::int64_t first = first_row + row - expert * out_rows;
      const simd::PackedWeights w =
          simd::packed_weights(quantization, out.dtype, packed.data, scales, expert, n, k);
      std::byte* target = static_cast<std::byte*>(out.data) + row * columns * element;
      if (columns == k) {
        const std::int64_t rows = std::min((expert + 1) * out_rows, end) - row;
        decode(w, first, rows, target);
        row += rows;
      } else {
        decode(w, first, 1, whole.data());
        std::memcpy(target, whole.data() + first_column * element, columns * element);
        ++row;
      }
    }
  });
}

}  // namespace moegemm::cpu
