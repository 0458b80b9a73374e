# Writes a C++ file with one digest of the kernels' sources for each device type: what was measured
# with other sources does not hold. Run by the build: cmake -DROOT=... -DOUTPUT=... -DCPU_COMPILER=...
# -DCUDA_COMPILER=... -P KernelSources.cmake
foreach(device cpu cuda)
  string(TOUPPER ${device} upper)
  set(text "${${upper}_COMPILER}\n")
  file(GLOB_RECURSE sources RELATIVE ${ROOT} ${ROOT}/src/${device}/*)
  list(SORT sources)
  foreach(source IN LISTS sources)
    file(SHA256 ${ROOT}/${source} digest)
    string(APPEND text "${source} ${digest}\n")
  endforeach()
  string(SHA256 digest "${text}")
  string(SUBSTRING ${digest} 0 16 ${device}_digest)
endforeach()
# Written only when it changes: nothing is compiled again for nothing.
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "core/tuning/cache/kernel_sources.h"

namespace moegemm {

const char* cpu_kernel_sources() { return "@cpu_digest@"; }
const char* cuda_kernel_sources() { return "@cuda_digest@"; }

}  // namespace moegemm
]])
