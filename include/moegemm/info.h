#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moegemm/kinds.h"
#include "moegemm/plan.h"

namespace moegemm {

struct CpuInfo {
  std::string model;              ///< as the system names it
  int threads = 0;                ///< workers of default_executor()
  std::string isa;                ///< the instruction set in use: MOEGEMM_CPU_ISA or the best one
  std::vector<std::string> isas;  ///< those this machine can run, best first
};

struct GpuInfo {
  int index = 0;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t shared_memory_bytes = 0;  ///< most that one block may use
  std::string backend;                   ///< the backend it gets, or why none
  std::string why;                       ///< why that one: what it covers, and who does the rest
};

struct BackendInfo {
  BackendKind kind = BackendKind::kReference;
  bool available = false;
  std::string reason;  ///< when not available: why
};

/// Version of the library, "0.1.0".
MOEGEMM_API std::string version();
/// Compiler, flags and CUDA architectures of this build, one line.
MOEGEMM_API std::string build_description();
MOEGEMM_API CpuInfo cpu_info();
/// Visible CUDA devices; when there are none, `why_none` (if given) says why.
MOEGEMM_API std::vector<GpuInfo> gpus(std::string* why_none = nullptr);
MOEGEMM_API std::vector<BackendInfo> backends();
MOEGEMM_API std::vector<KernelInfo> kernels();

}  // namespace moegemm
