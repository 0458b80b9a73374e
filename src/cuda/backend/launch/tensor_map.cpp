#include "cuda/backend/launch/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "cuda/backend/error.h"
#include "cuda/backend/launch/loading.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

/// A lookup that fails throws and is tried again by the next call.
EncodeTiled encode_tiled() {
  static const EncodeTiled entry = [] {
    void* address = driver_entry("cuTensorMapEncodeTiled");
    if (!address) {
      throw Error(ErrorKind::kRuntime,
                  "the CUDA driver has no cuTensorMapEncodeTiled (CUDA 12.0 or newer has)");
    }
    return reinterpret_cast<EncodeTiled>(address);
  }();
  return entry;
}

CUtensorMapDataType driver_type(const TensorMapSpec& spec) {
  switch (spec.dtype) {
    case DType::kFloat32:
      return spec.rounds_to_tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kInt32:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::kInt64:
      return CU_TENSOR_MAP_DATA_TYPE_INT64;
    default:  // other formats have 16 bits, which are moved as they are
      return CU_TENSOR_MAP_DATA_TYPE_UINT16;
  }
}

[[noreturn]] void refuse(const std::string& field, std::uint64_t value, const char* rule) {
  throw Error(ErrorKind::kRuntime,
              "tensor map: " + field + " is " + std::to_string(value) + ", must be " + rule);
}

std::string element(const char* field, int i) {
  return std::string(field) + "[" + std::to_string(i) + "]";
}

/// The rules of cuTensorMapEncodeTiled, whose own error does not say which one was broken.
void require_valid(const TensorMapSpec& spec) {
  const auto address = reinterpret_cast<std::uintptr_t>(spec.base);
  if (spec.rank < 1 || spec.rank > 5) {
    refuse("rank", static_cast<std::uint64_t>(spec.rank), "1 to 5");
  }
  if (address == 0 || address % 16 != 0) {
    refuse("base", address, "a device address that is a multiple of 16");
  }
  for (int i = 0; i < spec.rank; ++i) {
    if (spec.dims[i] < 1 || spec.dims[i] > (std::uint64_t{1} << 32)) {
      refuse(element("dims", i), spec.dims[i], "1 to 2^32");
    }
    if (spec.box[i] < 1 || spec.box[i] > 256) {
      refuse(element("box", i), spec.box[i], "1 to 256");
    }
  }
  for (int i = 0; i + 1 < spec.rank; ++i) {
    const std::uint64_t stride = spec.strides_bytes[i];
    if (stride % 16 != 0 || stride >= (std::uint64_t{1} << 40)) {
      refuse(element("strides_bytes", i), stride, "a multiple of 16 below 2^40");
    }
  }
  const std::uint64_t inner_bytes = spec.box[0] * size_bytes(spec.dtype);
  if (inner_bytes % 16 != 0) {
    refuse("box[0] in bytes", inner_bytes, "a multiple of 16");
  }
  if (spec.swizzle == CU_TENSOR_MAP_SWIZZLE_128B && inner_bytes > 128) {
    refuse("box[0] in bytes", inner_bytes, "at most 128 with the 128-byte swizzle");
  }
}

/// A thread that has made no runtime call yet has no context, for which the driver's functions do
/// not stand in as the runtime's do: PyTorch's backward threads begin like that when the first
/// thing they run is ours. Choosing the device that is current anyway binds its context.
void bind_context() {
  int device = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaSetDevice(device), "bind the device's context to this thread");
}

CUtensorMap encode_anew(const TensorMapSpec& spec) {
  require_valid(spec);
  static constexpr std::array<std::uint32_t, 5> kUnitSteps = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const auto ask_driver = [&] {
    return encode_tiled()(&map, driver_type(spec), static_cast<std::uint32_t>(spec.rank),
                          const_cast<void*>(spec.base), spec.dims.data(), spec.strides_bytes.data(),
                          spec.box.data(), kUnitSteps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                          spec.swizzle, spec.l2_promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = ask_driver();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    bind_context();
    status = ask_driver();
  }
  if (status != CUDA_SUCCESS) {
    std::string text = "tensor map: the driver refused (CUresult " +
                       std::to_string(static_cast<int>(status)) + ") rank " +
                       std::to_string(spec.rank) + ", dtype " + to_string(spec.dtype);
    for (int i = 0; i < spec.rank; ++i) {
      text += ", " + element("dims", i) + " " + std::to_string(spec.dims[i]) + " box " +
              std::to_string(spec.box[i]);
      if (i > 0) {
        text += " stride " + std::to_string(spec.strides_bytes[i - 1]) + " bytes";
      }
    }
    throw Error(ErrorKind::kRuntime, text);
  }
  return map;
}

}  // namespace

TensorMapSpec tensor_spec(const void* base, DType dtype, std::initializer_list<std::int64_t> dims,
                          std::initializer_list<std::int64_t> strides_bytes,
                          std::initializer_list<std::int64_t> box) {
  TensorMapSpec spec;
  spec.base = base;
  spec.dtype = dtype;
  spec.rank = static_cast<int>(dims.size());
  std::copy(dims.begin(), dims.end(), spec.dims.begin());
  std::copy(strides_bytes.begin(), strides_bytes.end(), spec.strides_bytes.begin());
  std::copy(box.begin(), box.end(), spec.box.begin());
  return spec;
}

CUtensorMap encode(const TensorMapSpec& spec) {
  // A map is a function of its spec alone. Weights stay where they are and allocators hand out the
  // same rows again, so that a layer's products mostly find theirs here, direct mapped.
  struct Known {
    TensorMapSpec spec;
    CUtensorMap map;
  };
  thread_local std::array<Known, 64> known = {};
  const std::size_t hash = reinterpret_cast<std::uintptr_t>(spec.base) / 512 + spec.box[1];
  Known& entry = known[hash % known.size()];
  if (spec.base == nullptr || entry.spec != spec) {
    entry.map = encode_anew(spec);  // throws before the entry changes
    entry.spec = spec;
  }
  return entry.map;
}

}  // namespace moegemm::cuda
