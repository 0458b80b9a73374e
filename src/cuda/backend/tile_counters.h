#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device/schedule/tile_counter.h"

namespace moegemm::cuda {

/// A counter in device memory for one launch on `stream` of `device`, which no kernel that could
/// run at the same time uses. nullptr when none is left: the kernel then walks the tiles in a
/// static stride, which is always right and a few percent slower.
///
/// No allocation, no memset, no synchronisation: the counters are a static array of the module.
///   * Eager launches: one counter for each stream (by cudaStreamGetId, which never repeats,
///     unlike the handle). Kernels of one stream take turns with it: one that starts before the
///     launch ahead has ended (LaunchStart) touches it after griddepcontrol_wait only.
///   * Launches under stream capture: a fresh counter for every captured launch, since branches of
///     a graph may overlap, and a graph may be replayed beside any stream and any other graph. The
///     capture is not disturbed. Launches of one instantiated graph never overlap.
/// The one limit: a captured graph that is instantiated twice, or cloned, must not have both copies
/// running at the same time, since they share the counters of their nodes.
TileCounter* acquire_tile_counter(int device, cudaStream_t stream);

/// The same for a launch of `blocks` over at most `tiles`. nullptr as well when no block can have a
/// second tile: a small product then asks the driver nothing about its stream.
inline TileCounter* acquire_tile_counter(int device, cudaStream_t stream, std::int64_t tiles,
                                         int blocks) {
  return tiles <= blocks ? nullptr : acquire_tile_counter(device, stream);
}

}  // namespace moegemm::cuda
