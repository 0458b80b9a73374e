#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cuda/backend/device_facts.h"
#include "cuda/backend/instance.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/tile_counters.h"
#include "cuda/device/element.cuh"

namespace moegemm::cuda {

/// What is decided about the launch of a kernel besides the kernel.
struct LaunchPolicy {
  int grid = 0;
  int tile_rows = 0;            ///< at most; 0: those of the kernel's tile
  std::int64_t smem_bytes = 0;  ///< of a block; 0: KernelEntry::smem_bytes
  TileOrder order = TileOrder::kByExpert;
  WeightCaching weights = WeightCaching::kKeep;
  LaunchStart start = LaunchStart::kAfter;
};

/// One compiled kernel, a line of src/cuda/instances: what it is, what it can run and how it is
/// started. Element types, and whatever else has a compiled function of its own, are variants
/// inside an entry.
struct KernelEntry {
  KernelInfo info;
  int arch = 80;                      ///< compute capability that it is compiled for, times ten
  bool exact = false;                 ///< and for no newer one
  int threads = 0;                    ///< of a block
  int blocks_per_multiprocessor = 1;  ///< as many at most: registers
  bool copies_apart = true;           ///< some warps do nothing but copy
  bool any_alignment = false;         ///< else operands are read 16 bytes at a time

  /// Output tiles at most, for any m_sizes.
  std::int64_t (*tiles)(const KernelInfo& info, const Problem& problem) = nullptr;
  /// Shared memory that a block needs.
  std::int64_t (*smem_bytes)(const Problem& problem) = nullptr;
  /// The variant for this problem; null if none is compiled.
  const void* (*function)(const Problem& problem) = nullptr;
  std::vector<const void*> layer_functions = {};  ///< variants that a layer in 16 bits may run

  /// Why the kernel, which is of the problem's op and for the GPU's architecture, cannot run it, as
  /// a clause; empty if it can.
  std::string (*refuse)(const KernelEntry& entry, const Problem& problem,
                        const DeviceFacts& facts) = nullptr;
  /// What a launch is told of the problem and the GPU: its step has all of it.
  LaunchPolicy (*grid)(const KernelEntry& entry, const Problem& problem,
                       const DeviceFacts& facts) = nullptr;
  void (*launch)(const KernelEntry& entry, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream) = nullptr;
};

/// KernelEntry::layer_functions: of.operator()<D>() are a kernel's variants for an element type.
template <typename Functions, DType... Ds>
std::vector<const void*> layer_functions(const Functions& of, Formats<Ds...>) {
  std::vector<const void*> compiled;
  for (const KernelFunctions& functions : {of.template operator()<Ds>()...}) {
    for (const void* function : {functions.plain, functions.gathered, functions.biased}) {
      if (function) compiled.push_back(function);
    }
  }
  return compiled;
}

/// Those of all kernels.
std::vector<const void*> layer_functions(const std::vector<KernelEntry>& kernels);

/// The feasibility predicate of one kernel: its op, its architecture and KernelEntry::refuse.
std::string refuse(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts);

/// The part of it that holds for every kernel: extents, tile numbers and shared memory.
std::string refuse_size(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts);

/// KernelEntry::tiles of row GEMMs.
std::int64_t most_row_tiles(const KernelInfo& info, const Problem& problem);

/// Thread blocks of this kernel that a multiprocessor runs at the same time.
int resident_blocks(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts);

/// Thread blocks of a persistent launch: as many as run at the same time, or as there are tiles.
int persistent_grid(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts);

/// KernelEntry::grid of weight GEMMs. For the order of dW's tiles see k_tiles_first.
LaunchPolicy weight_launch_policy(const KernelEntry& entry, const Problem& problem,
                                  const DeviceFacts& facts);

/// Launches the kernel with `params`, as they are.
void launch_prepared(const KernelEntry& entry, const Step& step, const Problem& problem,
                     void* params, cudaStream_t stream);

/// Launches the kernel with `params`, whose tile counter is set here.
template <typename Params>
void launch_kernel(const KernelEntry& entry, const Step& step, const Problem& problem,
                   Params& params, cudaStream_t stream) {
  params.counter = acquire_tile_counter(problem.device.index, stream,
                                        entry.tiles(entry.info, problem), step.grid);
  launch_prepared(entry, step, problem, &params, stream);
}

}  // namespace moegemm::cuda
