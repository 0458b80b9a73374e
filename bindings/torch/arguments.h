#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <locale>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "moegemm/error.h"
#include "moegemm/tensor.h"

namespace moegemm::torch_ops {

using Tensor = torch::stable::Tensor;

/// torch has no memory for what a call makes.
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message) : Error(ErrorKind::kRuntime, message) {}
};

/// A tensor of ours alone. Unlike a Tensor it shares nothing, and so allocates nothing.
struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

inline AtenTensorHandle handle_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->get() : nullptr;
}

/// Raises moegemm::Error with the parts joined; they read as "argument, value; rule".
template <class... Parts>
[[noreturn]] void refuse(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  message.imbue(std::locale::classic());
  (message << ... << parts);
  throw Error(kind, message.str());
}
template <class... Parts>
[[noreturn]] void refuse_value(const Parts&... parts) {
  refuse(ErrorKind::kInvalidValue, parts...);
}
template <class... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
  refuse(ErrorKind::kInvalidType, parts...);
}

/// For torch's functions that want a Tensor.
Tensor shared(AtenTensorHandle tensor);
/// Without gaps: a copy of one that has some.
Tensor contiguous(AtenTensorHandle tensor, Device device);
std::int32_t dtype_number(AtenTensorHandle tensor);
const char* dtype_name(AtenTensorHandle tensor);
/// Null where a tensor has none.
const void* readable_data(AtenTensorHandle tensor);

/// Rank, shape and device of a tensor; refuses what the library does not know.
struct Extents {
  Extents(const char* name, AtenTensorHandle tensor);

  int rank = 0;
  std::array<std::int64_t, 3> shape = {};
  Device device;
};

/// A torch tensor as the library sees it. Reading it touches metadata only; `readable` may copy.
/// What no TensorView can say (a rank, dtype or device that the library does not know) is refused
/// here, every other rule is the library's. The tensor must outlive it.
class Argument {
 public:
  Argument() = default;                                 ///< not given
  Argument(const char* name, AtenTensorHandle tensor);  ///< null: not given
  Argument(const char* name, const Tensor& tensor) : Argument(name, tensor.get()) {}
  Argument(const char* name, const std::optional<Tensor>& tensor)
      : Argument(name, handle_of(tensor)) {}

  bool given() const { return view_.given(); }
  std::int64_t size(int dim) const { return view_.shape[dim]; }
  std::int64_t columns() const { return given() ? view_.shape[view_.rank - 1] : 0; }
  std::int64_t numel() const { return view_.numel(); }
  DType dtype() const { return view_.dtype; }
  Device device() const { return view_.device; }
  /// Shape, dtype and device; no data yet.
  const TensorView& metadata() const { return view_; }

  /// The view to read through; that of one which is not given is not given either. Rows that the
  /// library can walk (contiguous last dimension, row stride at least its length, evenly spaced
  /// matrices) are used where they are; others are copied once.
  const TensorView& readable();
  /// The same without a gap between rows.
  const TensorView& readable_dense();
  /// Whether `readable` launched a copy.
  bool copied() const { return copy_.has_value(); }
  /// The view to write through; refuses what `readable` would have copied.
  const TensorView& writable();

 private:
  bool walkable();
  void make_contiguous();

  const char* name_ = "";
  AtenTensorHandle tensor_ = nullptr;
  std::optional<Tensor> copy_;  ///< with rows that the library can walk
  TensorView view_;
};

/// An uninitialised dense tensor from torch's allocator, and its view.
struct Output {
  OwnTensor own;
  TensorView view;

  /// To torch; nothing is left here.
  Tensor hand_over() { return Tensor(own.release()); }
};
/// Its first `rank` extents count. A negative one is the library's to refuse: it gets none.
Output allocate(int rank, const std::array<std::int64_t, 3>& shape, DType dtype, Device device);
inline Output allocate(std::int64_t length, DType dtype, Device device) {
  return allocate(1, {length}, dtype, device);
}
inline Output allocate(std::int64_t rows, std::int64_t columns, DType dtype, Device device) {
  return allocate(2, {rows, columns}, dtype, device);
}
/// Raw bytes on a device, for workspaces.
Tensor allocate_bytes(std::int64_t bytes, Device device);

}  // namespace moegemm::torch_ops
