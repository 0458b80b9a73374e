#pragma once

#include <cstdint>
#include <random>

#include "cpu/element_type.h"
#include "cpu/routing_data.h"
#include "device_buffer.h"
#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// A matrix (or, with one column, a vector) with the same bytes on the host and on the device: the
/// input, or the poisoned output, of a CPU kernel and of its GPU counterpart. Padding between rows
/// and around the matrix is part of it, so that a stray write shows.
class TensorPair {
 public:
  /// `pad` elements follow each row; the first element is `lead` elements into the memory. All
  /// bytes start as 0xff: NaN, or -1.
  TensorPair(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t pad = 0,
             std::int64_t lead = 0)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        stride_(cols + pad),
        lead_(lead),
        bytes_(static_cast<std::size_t>((lead + rows * (cols + pad) + 8) * size_bytes(dtype)),
               0xff) {}

  TensorView matrix() { return matrix_in(bytes_.host(), Device{}); }
  TensorView device_matrix() { return matrix_in(bytes_.device(), kGpu); }
  TensorView vector() { return vector_in(bytes_.host(), Device{}); }
  TensorView device_vector() { return vector_in(bytes_.device(), kGpu); }

  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }
  void upload() { bytes_.upload(); }
  /// Every byte, padding included, is the same on both sides.
  bool identical() const { return bytes_.matches_device(); }
  std::vector<unsigned char> download() const { return bytes_.download(); }

  float value(std::int64_t row, std::int64_t col = 0) const {
    return value_in(bytes_.host(), row, col);
  }
  float value_in(const unsigned char* memory, std::int64_t row, std::int64_t col = 0) const {
    return cpu::read_float(memory, dtype_, lead_ + row * stride_ + col);
  }
  std::int64_t index(std::int64_t i) const {
    return cpu::read_index(bytes_.host(), dtype_, lead_ + i * stride_);
  }
  void set_value(std::int64_t row, std::int64_t col, float value) {
    cpu::write_float(bytes_.host(), dtype_, lead_ + row * stride_ + col, value);
  }
  void set_index(std::int64_t row, std::int64_t col, std::int64_t value) {
    cpu::write_index(bytes_.host(), dtype_, lead_ + row * stride_ + col, value);
  }

  /// Standard normal values, on both sides.
  void fill_normal(std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) {
        set_value(r, c, normal(random));
      }
    }
    upload();
  }

 private:
  static constexpr Device kGpu = {DeviceType::kCuda, 0};

  TensorView matrix_in(unsigned char* memory, Device device) const {
    return TensorView::matrix(memory + lead_ * size_bytes(dtype_), dtype_, rows_, cols_, stride_,
                              device);
  }
  TensorView vector_in(unsigned char* memory, Device device) const {
    return TensorView::vector(memory + lead_ * size_bytes(dtype_), dtype_, rows_, device);
  }

  DType dtype_;
  std::int64_t rows_, cols_, stride_, lead_;
  MirroredBytes bytes_;
};

}  // namespace moegemm::cuda
