#pragma once

#include <cstdint>
#include <vector>

#include "layer/tensors/device_memory.h"
#include "moegemm/tensor.h"

namespace moegemm::cli {

/// Device memory and the view of it.
struct DeviceTensor {
  DeviceMemory::Buffer buffer;
  TensorView view;
};

/// [rows, cols], uninitialised.
DeviceTensor make_matrix(DeviceMemory& memory, DType dtype, std::int64_t rows, std::int64_t cols);
/// [count, rows, cols], uninitialised.
DeviceTensor make_stack(DeviceMemory& memory, DType dtype, std::int64_t count, std::int64_t rows,
                        std::int64_t cols);

/// A vector with these values, whose type must be that of `dtype`.
template <typename T>
DeviceTensor upload(DeviceMemory& memory, DType dtype, const std::vector<T>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  DeviceTensor tensor{memory.allocate(count * size_bytes(dtype)), {}};
  tensor.view = TensorView::vector(tensor.buffer.get(), dtype, count, memory.device());
  memory.copy_in(tensor.buffer.get(), values.data(), count * size_bytes(dtype));
  return tensor;
}

}  // namespace moegemm::cli
