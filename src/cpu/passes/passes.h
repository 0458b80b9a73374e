#pragma once

#include "core/backend.h"

namespace moegemm::cpu {

/// The memory-bound operations on the CPU.
class CpuPasses final : public Passes {
 public:
#define MOEGEMM_PASS_IS override
#include "core/passes.inc"
};

}  // namespace moegemm::cpu
