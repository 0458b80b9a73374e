#include "layer/tensors/device_tensor.h"

namespace moegemm::cli {

DeviceTensor make_matrix(DeviceMemory& memory, DType dtype, std::int64_t rows, std::int64_t cols) {
  DeviceTensor tensor{memory.allocate(rows * cols * size_bytes(dtype)), {}};
  tensor.view = TensorView::matrix(tensor.buffer.get(), dtype, rows, cols, 0, memory.device());
  return tensor;
}

DeviceTensor make_stack(DeviceMemory& memory, DType dtype, std::int64_t count, std::int64_t rows,
                        std::int64_t cols) {
  DeviceTensor tensor{memory.allocate(count * rows * cols * size_bytes(dtype)), {}};
  tensor.view =
      TensorView::stack(tensor.buffer.get(), dtype, count, rows, cols, 0, memory.device());
  return tensor;
}

}  // namespace moegemm::cli
