#include "arguments.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "dtypes.h"

/// What torch says of the last call that failed: of 2.13 and newer, null before.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace moegemm::torch_ops {
namespace {

DType checked_dtype(const char* name, AtenTensorHandle tensor) {
  const std::optional<DType> dtype = library_dtype(dtype_number(tensor));
  if (!dtype) {
    refuse_type(name, " has dtype ", dtype_name(tensor), "; accepted are ",
                names_of(kFloatingFormats), " for values, ", names_of(kIndexFormats),
                " for sizes and indices");
  }
  return *dtype;
}

Device library_device(const char* name, AtenTensorHandle tensor) {
  std::int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &type));
  if (type == numbers().cpu) return {DeviceType::kCpu, 0};
  if (type == numbers().meta) return {DeviceType::kMeta, 0};
  if (type != numbers().cuda) {
    refuse_type(name, " is on a device of type number ", type, "; accepted are cpu and cuda");
  }
  std::int32_t index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &index));
  return {DeviceType::kCuda, index};
}

void* writable_data(AtenTensorHandle tensor) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor, &data));
  return data;
}

/// torch made no tensor of this shape.
[[noreturn]] void refuse_allocation(std::int64_t rank, const std::int64_t* shape, Device device) {
  const bool asked = torch_exception_get_what_without_backtrace != nullptr;
  std::string said = asked ? torch_exception_get_what_without_backtrace() : "";
  bool memory = !asked;  // then that is the likely reason
  for (const char* words : {"out of memory", "allocate memory", "not enough memory"}) {
    memory = memory || said.find(words) != std::string::npos;
  }
  if (!asked) said = device.type == DeviceType::kCuda ? "CUDA out of memory." : "Out of memory.";
  said += "\nThis was for a tensor [";
  for (std::int64_t dim = 0; dim < rank; ++dim) {
    said += (dim == 0 ? "" : ", ") + std::to_string(shape[dim]);
  }
  said += "] on " + to_string(device);
  if (memory) throw OutOfMemory(said);
  throw Error(ErrorKind::kRuntime, said);
}

OwnTensor allocate_torch(std::int64_t rank, const std::int64_t* shape, std::int32_t dtype,
                         Device device) {
  std::array<std::int64_t, 3> strides = {1, 1, 1};
  for (std::int64_t dim = rank - 2; dim >= 0; --dim) {
    strides[dim] = strides[dim + 1] * (shape[dim + 1] > 0 ? shape[dim + 1] : 1);
  }
  const std::int32_t type = device.type == DeviceType::kCpu    ? numbers().cpu
                            : device.type == DeviceType::kCuda ? numbers().cuda
                                                               : numbers().meta;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, shape, strides.data(), dtype, type, device.index, &handle) !=
      AOTI_TORCH_SUCCESS) {
    refuse_allocation(rank, shape, device);
  }
  return OwnTensor(handle);
}

}  // namespace

Tensor shared(AtenTensorHandle tensor) {
  AtenTensorHandle copy = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &copy));
  return Tensor(copy);
}

Tensor contiguous(AtenTensorHandle tensor, Device device) {
  try {
    return torch::stable::contiguous(shared(tensor));
  } catch (const std::exception&) {
    const Extents extents("a tensor", tensor);
    refuse_allocation(extents.rank, extents.shape.data(), device);
  }
}

std::int32_t dtype_number(AtenTensorHandle tensor) {
  std::int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &number));
  return number;
}

const char* dtype_name(AtenTensorHandle tensor) {
  return torch::headeronly::toString(shared(tensor).scalar_type());
}

const void* readable_data(AtenTensorHandle tensor) {
  const void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor, &data));
  return data;
}

Extents::Extents(const char* name, AtenTensorHandle tensor) {
  std::int64_t dimensions = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dimensions));
  if (dimensions < 1 || dimensions > 3) {
    refuse_value(name, " has ", dimensions, " dimensions; between 1 and 3 are accepted");
  }
  std::int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  rank = static_cast<int>(dimensions);
  std::copy_n(sizes, rank, shape.begin());
  device = library_device(name, tensor);
}

Argument::Argument(const char* name, AtenTensorHandle tensor) : name_(name), tensor_(tensor) {
  if (tensor == nullptr) return;
  const Extents extents(name, tensor);
  view_.rank = extents.rank;
  view_.shape = extents.shape;
  view_.row_stride = view_.shape[view_.rank - 1];
  view_.dtype = checked_dtype(name, tensor);
  view_.device = extents.device;
}

bool Argument::walkable() {
  std::int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor_, &strides));
  const auto& shape = view_.shape;
  const int last = view_.rank - 1;
  if (numel() == 0) {
    view_.row_stride = shape[last];
    return true;
  }
  if (shape[last] > 1 && strides[last] != 1) return false;
  if (view_.rank == 1) return true;
  // The stride of a dimension of length 1 is never walked and may be anything.
  std::int64_t row_stride = shape[last - 1] > 1 ? strides[last - 1] : shape[last];
  if (view_.rank == 3 && shape[0] > 1) {
    if (shape[1] == 1) row_stride = strides[0];
    if (strides[0] != shape[1] * row_stride) return false;
  }
  view_.row_stride = row_stride;
  return row_stride >= shape[last];
}

void Argument::make_contiguous() {
  copy_ = contiguous(tensor_, view_.device);
  view_.data = const_cast<void*>(copy_->const_data_ptr());
  view_.row_stride = view_.shape[view_.rank - 1];
}

const TensorView& Argument::readable() {
  if (!given()) return view_;
  if (walkable()) {
    view_.data = const_cast<void*>(readable_data(tensor_));
  } else {
    make_contiguous();
  }
  return view_;
}

const TensorView& Argument::readable_dense() {
  readable();
  if (view_.rank > 1 && view_.row_stride != columns()) make_contiguous();
  return view_;
}

const TensorView& Argument::writable() {
  if (!walkable()) {
    refuse_value(
        name_, " is ", to_string(view_),
        " with strides that overlap or skip; its last dimension must be contiguous and its "
        "rows at least that far apart");
  }
  view_.data = writable_data(tensor_);
  return view_;
}

Output allocate(int rank, const std::array<std::int64_t, 3>& asked, DType dtype, Device device) {
  std::array<std::int64_t, 3> shape = asked;
  for (std::int64_t& extent : shape) extent = std::max<std::int64_t>(extent, 0);
  Output output{allocate_torch(rank, shape.data(), torch_dtype(dtype), device), {}};
  TensorView& view = output.view;
  view.data = writable_data(output.own.get());
  view.dtype = dtype;
  view.rank = rank;
  view.shape = shape;
  view.row_stride = view.shape[rank - 1];
  view.device = device;
  return output;
}

Tensor allocate_bytes(std::int64_t bytes, Device device) {
  return Tensor(allocate_torch(1, &bytes, numbers().uint8, device).release());
}

}  // namespace moegemm::torch_ops
