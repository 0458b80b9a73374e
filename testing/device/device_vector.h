#pragma once

#include <vector>

#include "testing/device/memory.h"
#include "testing/numerics/floats.h"
#include "testing/problem/host_problem.h"

namespace moegemm::testing {

/// A HostMatrix in device memory, guarded, with its view.
class DeviceMatrix {
 public:
  DeviceMatrix(Memory& memory, const HostMatrix& host) : buffer_(memory, host.bytes.size(), true) {
    buffer_.upload(host.bytes.data());
    char* base = static_cast<char*>(buffer_.data());
    view_ =
        TensorView::matrix(base == nullptr ? nullptr : base + host.offset * size_bytes(host.dtype),
                           host.dtype, host.rows, host.cols, host.stride, memory.device());
  }
  const TensorView& view() const { return view_; }
  std::vector<unsigned char> download() const { return buffer_.download(); }
  bool guards_intact() const { return buffer_.guards_intact(); }

 private:
  Buffer buffer_;
  TensorView view_;
};

/// Integers or floats in device memory, guarded, with their view.
class DeviceVector {
 public:
  DeviceVector(Memory& memory, DType dtype, const std::vector<std::int64_t>& values)
      : DeviceVector(memory, dtype, static_cast<std::int64_t>(values.size())) {
    std::vector<unsigned char> bytes(values.size() * size_bytes(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      encode_index(dtype, bytes.data(), static_cast<std::int64_t>(i), values[i]);
    }
    buffer_.upload(bytes.data());
  }
  DeviceVector(Memory& memory, DType dtype, const std::vector<float>& values)
      : DeviceVector(memory, dtype, static_cast<std::int64_t>(values.size())) {
    std::vector<unsigned char> bytes(values.size() * size_bytes(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      encode(dtype, bytes.data(), static_cast<std::int64_t>(i), values[i]);
    }
    buffer_.upload(bytes.data());
  }
  /// Poisoned, to be written.
  DeviceVector(Memory& memory, DType dtype, std::int64_t count)
      : dtype_(dtype), count_(count), buffer_(memory, count * size_bytes(dtype), true) {
    view_ = TensorView::vector(buffer_.data(), dtype, count, memory.device());
  }

  const TensorView& view() const { return view_; }
  std::vector<std::int64_t> integers() const {
    const std::vector<unsigned char> bytes = buffer_.download();
    std::vector<std::int64_t> values(count_);
    for (std::int64_t i = 0; i < count_; ++i) values[i] = decode_index(dtype_, bytes.data(), i);
    return values;
  }
  std::vector<unsigned char> download() const { return buffer_.download(); }
  bool guards_intact() const { return buffer_.guards_intact(); }

 private:
  DType dtype_;
  std::int64_t count_;
  Buffer buffer_;
  TensorView view_;
};

}  // namespace moegemm::testing
