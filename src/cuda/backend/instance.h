#pragma once

/// What a line of src/cuda/instances says and leads to, whatever the family of its kernel. Read by
/// the translation units of all kernels: nothing of the standard library here.
namespace moegemm::cuda {

/// The compiled variants of a kernel for one element type; null where there is none.
struct KernelFunctions {
  const void* plain = nullptr;        ///< rows in order, unless it is the only variant
  const void* gathered = nullptr;     ///< rows that are gathered
  const void* biased = nullptr;       ///< rows in order with a bias that `plain` does not add
  const void* fp32_output = nullptr;  ///< of 16-bit inputs
};

}  // namespace moegemm::cuda
