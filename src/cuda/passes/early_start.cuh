#pragma once

#include "cuda/backend/device_facts.h"
#include "cuda/ptx/griddepcontrol.cuh"
#include "moegemm/execution.h"

namespace moegemm::cuda {

/// Whether a pass may begin before the launch ahead of it has ended; `Archs` is __CUDA_ARCH_LIST__
/// of its translation unit. Not where multiprocessors are left to others: blocks that wait would
/// take those.
template <int... Archs>
bool starts_early(Device device, const ExecutionContext& context) {
  return context.max_multiprocessors == 0 &&
         ptx::has_griddepcontrol<Archs...>(device_facts(device.index)->major);
}

}  // namespace moegemm::cuda
