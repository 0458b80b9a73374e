#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/weight_decoding.h"

namespace moegemm::cpu {

void CpuPasses::dequantise(const TensorView& packed, const void* scales,
                           const Quantization& quantization, const TensorView& out,
                           const ExecutionContext& context) const {
  const auto [experts, n, k] = out.shape;
  constexpr std::int64_t kGrainElements = 32 * 1024;
  const std::int64_t grain = (kGrainElements + k - 1) / k;
  for_each_range(context, experts * n, grain, [&](std::int64_t begin, std::int64_t end) {
    with_element_type(out.dtype, [&]<typename T>(T*) {
      for (std::int64_t row = begin; row < end; ++row) {
        const QuantizedExpert w(quantization, packed.data, scales, row / n, n, k);
        T* const target = static_cast<T*>(out.data) + row * k;
        for (std::int64_t c = 0; c < k; ++c) store(w.at(row % n, c), target[c]);
      }
    });
  });
}

}  // namespace moegemm::cpu
