#include <cstddef>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/passes/rows.h"

namespace moegemm::cpu {

void CpuPasses::gather_rows(const TensorView& rows, const TensorView& gather_indices,
                            std::int64_t divisor, const TensorView& gathered,
                            const ExecutionContext& context) const {
  constexpr std::int64_t kGrainBytes = 64 * 1024;
  const std::int64_t count = gathered.shape[0];
  const std::int64_t flat_rows = rows.shape[0] * divisor;
  const std::int64_t element = size_bytes(rows.dtype);
  const auto bytes = static_cast<std::size_t>(rows.shape[1] * element);
  const std::int64_t grain = grain_rows(kGrainBytes, rows.shape[1] * element);
  for_each_range(context, count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      std::byte* target =
          static_cast<std::byte*>(gathered.data) + r * gathered.row_stride * element;
      const std::int64_t flat = read_index(gather_indices.data, gather_indices.dtype, r);
      if (flat < 0 || flat >= flat_rows) {
        std::memset(target, 0, bytes);
      } else {
        std::memcpy(
            target,
            static_cast<const std::byte*>(rows.data) + flat / divisor * rows.row_stride * element,
            bytes);
      }
    }
  });
}

}  // namespace moegemm::cpu
