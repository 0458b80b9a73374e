#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/passes/rows.h"

namespace moegemm::cpu {

void CpuPasses::resize_rows(const TensorView& from, const TensorView& to,
                            const ExecutionContext& context) const {
  constexpr std::int64_t kGrainBytes = 64 * 1024;
  const std::int64_t element = size_bytes(to.dtype);
  const std::int64_t rows = to.shape[1];
  const std::int64_t row_bytes = to.shape[2] * element;
  const auto line = [element](const TensorView& view, std::int64_t matrix, std::int64_t row) {
    return static_cast<std::byte*>(view.data) +
           (matrix * view.shape[1] + row) * view.row_stride * element;
  };
  for_each_range(context, to.shape[0] * rows, grain_rows(kGrainBytes, row_bytes),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int64_t row = i % rows;
                     const std::int64_t copied =
                         row < from.shape[1] ? std::min(from.shape[2], to.shape[2]) * element : 0;
                     std::byte* const target = line(to, i / rows, row);
                     if (copied > 0) {
                       std::memcpy(target, line(from, i / rows, row),
                                   static_cast<std::size_t>(copied));
                     }
                     std::memset(target + copied, 0, static_cast<std::size_t>(row_bytes - copied));
                   }
                 });
}

}  // namespace moegemm::cpu
