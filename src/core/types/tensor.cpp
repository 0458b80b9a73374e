#include "moegemm/tensor.h"

#include "core/process/named_gpus.h"
#include "core/refusal.h"

namespace moegemm {

std::int64_t TensorView::numel() const {
  if (rank == 0) return 0;
  std::int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

TensorView TensorView::vector(const void* data, DType dtype, std::int64_t n, Device device) {
  return {const_cast<void*>(data), dtype, 1, {n}, n, device};
}

TensorView TensorView::matrix(const void* data, DType dtype, std::int64_t rows,
                              std::int64_t columns, std::int64_t row_stride, Device device) {
  return {const_cast<void*>(data),
          dtype,
          2,
          {rows, columns},
          row_stride == 0 ? columns : row_stride,
          device};
}

TensorView TensorView::stack(const void* data, DType dtype, std::int64_t count, std::int64_t rows,
                             std::int64_t columns, std::int64_t row_stride, Device device) {
  return {const_cast<void*>(data),
          dtype,
          3,
          {count, rows, columns},
          row_stride == 0 ? columns : row_stride,
          device};
}

const char* to_string(DType dtype) { return format_of(dtype).name; }

std::string to_string(Device device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  if (device.type == DeviceType::kMeta) return "meta";
  if (const NamedGpu* gpu = named_gpu(device.index)) return join("cuda (", gpu->name, ")");
  return join("cuda:", device.index);
}

std::string to_string(const TensorView& view) {
  if (!view.given()) return "not given";
  const int most = static_cast<int>(view.shape.size());
  if (view.rank < 0 || view.rank > most) {
    return join(to_string(view.dtype), " of rank ", view.rank, " on ", to_string(view.device));
  }
  std::string text = join(to_string(view.dtype), "[");
  for (int i = 0; i < view.rank; ++i) {
    text += join(i == 0 ? "" : ", ", view.shape[i]);
  }
  text += "]";
  if (view.rank > 1 && view.row_stride != view.shape[view.rank - 1]) {
    text += join(" with row stride ", view.row_stride);
  }
  return text + " on " + to_string(view.device);
}

}  // namespace moegemm
