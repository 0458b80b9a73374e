#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

/// Copies into and out of shared memory: the bulk tensor copy engine (TMA), cp.async, stmatrix.
namespace moegemm::cuda::ptx {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// One box of a 2-D map; its bytes count towards the transaction of `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(void* shared, const CUtensorMap* map, int x,
                                                        int y, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

/// One box of a 3-D map.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(void* shared, const CUtensorMap* map, int x,
                                                        int y, int z, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

/// The same with an L2 policy.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(void* shared, const CUtensorMap* map, int x,
                                                        int y, int z, std::uint64_t* barrier,
                                                        std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// One box of a 4-D map.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(void* shared, const CUtensorMap* map, int x,
                                                        int y, int z, int w,
                                                        std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
}

/// One box of a 5-D map.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(void* shared, const CUtensorMap* map, int x,
                                                        int y, int z, int w, int v,
                                                        std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(barrier))
      : "memory");
}

/// Shared to global through a 3-D map, clipped at the tensor's edges.
__device__ __forceinline__ void cp_async_bulk_tensor_store_3d(const CUtensorMap* map, int x, int y,
                                                              int z, const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(shared))
      : "memory");
}

/// The L2 policy for data that nobody reads again soon: its lines are the first to go.
__device__ __forceinline__ std::uint64_t createpolicy_evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// The same store with an L2 policy.
__device__ __forceinline__ void cp_async_bulk_tensor_store_3d(const CUtensorMap* map, int x, int y,
                                                              int z, const void* shared,
                                                              std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3}], [%4], %5;" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(shared)), "l"(policy)
      : "memory");
}

/// Adds to what is in global memory instead of overwriting it, elementwise in the map's type.
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_add_3d(const CUtensorMap* map, int x,
                                                                   int y, int z,
                                                                   const void* shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group "
      "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(shared))
      : "memory");
}

/// Brings one box of a 3-D map into L2.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_3d(const CUtensorMap* map, int x,
                                                                 int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until at most `Pending` bulk stores of this thread still read shared memory.
template <int Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

/// 16 bytes, past L1. The pointer must be 16-byte aligned.
__device__ __forceinline__ void cp_async_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
}

/// 16 bytes, or 16 zero bytes without touching `global`.
__device__ __forceinline__ void cp_async_16_or_zero(std::uint32_t shared, const void* global,
                                                    bool load) {
  const int source_bytes = load ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(source_bytes)
               : "memory");
}

/// Until all copies of this thread have arrived.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Orders this thread's generic-proxy view of shared memory before what the tensor cores or the
/// copy engine read next.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t shared, std::uint32_t m0,
                                            std::uint32_t m1, std::uint32_t m2, std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

/// The same, each matrix transposed on the way.
__device__ __forceinline__ void stmatrix_x4_trans(std::uint32_t shared, std::uint32_t m0,
                                                  std::uint32_t m1, std::uint32_t m2,
                                                  std::uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

/// The same for two matrices; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void stmatrix_x2_trans(std::uint32_t shared, std::uint32_t m0,
                                                  std::uint32_t m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared),
               "r"(m0), "r"(m1)
               : "memory");
}

}  // namespace moegemm::cuda::ptx
