#include "cpu/passes/passes.h"

#include "core/registry.h"

namespace moegemm {

const Passes& cpu_passes() {
  static const cpu::CpuPasses passes;
  return passes;
}

}  // namespace moegemm
