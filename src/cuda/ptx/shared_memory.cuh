#pragma once

#include <cstdint>

/// Shared memory without the copy engine: cp.async beyond the 16-byte copies of copy.cuh, and plain
/// loads and stores by 32-bit address.
namespace moegemm::cuda::ptx {

/// 4 bytes, or 4 zero bytes without touching `global`, which must be 4-byte aligned.
__device__ __forceinline__ void cp_async_4_or_zero(std::uint32_t shared, const void* global,
                                                   bool load) {
  const int source_bytes = load ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(source_bytes)
               : "memory");
}

/// 16 bytes, or nothing at all. The pointer must be 16-byte aligned.
__device__ __forceinline__ void cp_async_16_if(std::uint32_t shared, const void* global,
                                               bool load) {
  asm volatile(
      "{\n"
      ".reg .pred load;\n"
      "setp.ne.b32 load, %2, 0;\n"
      "@load cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(load))
      : "memory");
}

/// All copies of this thread since the last commit are one group, empty or not.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Until at most `Pending` of this thread's groups, the newest ones, are in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ std::uint32_t ld_shared_4(std::uint32_t shared) {
  std::uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ void st_shared_16(std::uint32_t shared, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

/// A hint: brings the line of `global` into L2.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace moegemm::cuda::ptx
