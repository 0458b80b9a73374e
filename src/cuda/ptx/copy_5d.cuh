#pragma once

#include "cuda/ptx/copy.cuh"

namespace moegemm::cuda::ptx {

/// One box of a 5-D map; its bytes count towards the transaction of `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(void* shared, const CUtensorMap* map, int x,
                                                        int y, int z, int w, int v,
                                                        std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace moegemm::cuda::ptx
