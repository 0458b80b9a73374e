#include "testing/device/device_tensor.h"

namespace moegemm::testing {
namespace {

Buffer allocate(Memory& memory, DType dtype, std::int64_t elements) {
  return {memory, static_cast<std::size_t>(elements * size_bytes(dtype))};
}

}  // namespace

DeviceTensor make_vector(Memory& memory, DType dtype, std::int64_t count) {
  DeviceTensor tensor{allocate(memory, dtype, count), {}};
  tensor.view = TensorView::vector(tensor.buffer.data(), dtype, count, memory.device());
  return tensor;
}

DeviceTensor make_matrix(Memory& memory, DType dtype, std::int64_t rows, std::int64_t cols) {
  DeviceTensor tensor{allocate(memory, dtype, rows * cols), {}};
  tensor.view = TensorView::matrix(tensor.buffer.data(), dtype, rows, cols, 0, memory.device());
  return tensor;
}

DeviceTensor make_stack(Memory& memory, DType dtype, std::int64_t count, std::int64_t rows,
                        std::int64_t cols) {
  DeviceTensor tensor{allocate(memory, dtype, count * rows * cols), {}};
  tensor.view =
      TensorView::stack(tensor.buffer.data(), dtype, count, rows, cols, 0, memory.device());
  return tensor;
}

}  // namespace moegemm::testing
