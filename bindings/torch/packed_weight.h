#pragma once

#include <optional>
#include <string>

#include "arguments.h"
#include "moegemm/quantization.h"

namespace moegemm::torch_ops {

/// A quantised W as torch tensors. `format` is a text for parse_quantization, of
///   mxfp4  w uint8 [E, N, K / 2]             scales uint8 or float8_e8m0fnu
///   fp8    w float8_e4m3fn or uint8 [E, N, K]
///   int4   w int32 [E, N, K / 8]
///   nf4    w uint8 [E, N, K / 2]; K may be odd in a flat [E, bytes] with the shape after the
///          format, as in "nf4/64/5x33"
/// Reading it touches metadata only; `read` may copy.
class PackedWeight {
 public:
  /// `dtype` is what its values are decoded to.
  PackedWeight(const char* name, AtenTensorHandle w, const char* scales_name,
               AtenTensorHandle scales, const std::string& format, DType dtype);

  const Quantization& quantization() const { return quantization_; }
  /// [E, N, K] of `dtype`; its data, once read, are the packed values.
  const TensorView& view() const { return view_; }
  const ScalesView& scales() const { return scales_; }

  /// Fills in the pointers. What is not contiguous is copied once.
  void read();
  bool copied() const { return w_copy_ || scales_copy_; }

 private:
  TensorView view_;
  ScalesView scales_;
  Quantization quantization_;
  AtenTensorHandle w_tensor_;
  AtenTensorHandle scales_tensor_;
  std::optional<Tensor> w_copy_, scales_copy_;
};

}  // namespace moegemm::torch_ops
