#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "moegemm/error.h"
#include "moegemm/tensor.h"

namespace moegemm::torch_ops {

using Tensor = torch::stable::Tensor;

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

/// A torch tensor under the name that its Python caller knows, with what the library has to know of
/// it. Reading it touches metadata only; `readable` may copy. The tensor must outlive it.
class Argument {
 public:
  Argument() = default;                                 ///< not given
  Argument(const char* name, AtenTensorHandle tensor);  ///< null: not given
  Argument(const char* name, const Tensor& tensor) : Argument(name, tensor.get()) {}
  Argument(const char* name, const std::optional<Tensor>& tensor)
      : Argument(name, handle_of(tensor)) {}

  const char* name() const { return name_; }
  bool given() const { return view_.rank != 0; }
  int rank() const { return view_.rank; }
  std::int64_t size(int dim) const { return view_.shape[dim]; }
  std::int64_t numel() const { return view_.numel(); }
  DType dtype() const { return view_.dtype; }
  Device device() const { return view_.device; }
  std::string describe() const { return to_string(view_); }

  void require_rank(int rank, const char* shape) const;
  void require_floating() const;
  void require_index() const;
  void require_same_device(const Argument& lead) const;
  void require_same_dtype(const Argument& lead) const;
  void require_dtype_or_float32(const Argument& lead) const;

  /// The view to read through. Rows that the library can walk (contiguous last dimension, row
  /// stride at least its length, evenly spaced matrices) are used where they are; others are copied
  /// once.
  const TensorView& readable();
  /// The same elements as one vector.
  TensorView readable_vector();
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
Output allocate(std::initializer_list<std::int64_t> shape, DType dtype, Device device);
/// Raw bytes on a device, for workspaces.
Tensor allocate_bytes(std::int64_t bytes, Device device);

}  // namespace moegemm::torch_ops
