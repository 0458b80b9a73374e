#include "moegemm/info.h"

#include "core/refusal.h"
#include "core/registry.h"

namespace moegemm {

std::string version() { return MOEGEMM_VERSION; }

std::string build_description() {
#if defined(__clang__)
  const char* compiler = "clang " __clang_version__;
#else
  const char* compiler = "gcc " __VERSION__;
#endif
  return join(compiler, ", ", MOEGEMM_BUILD_TYPE, ", ", MOEGEMM_CUDA_DESCRIPTION);
}

CpuInfo cpu_info() { return query_cpu(); }

std::vector<GpuInfo> gpus(std::string* why_none) {
#if MOEGEMM_HAS_CUDA
  return query_gpus(why_none);
#else
  if (why_none != nullptr) *why_none = "this library was built without CUDA";
  return {};
#endif
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> result;
  for (const Backend* backend : all_backends()) {
    // A backend is available if some device of this machine runs it: the CPU, or any GPU.
    std::string reason = backend->unavailable(Device{DeviceType::kCpu, 0});
    if (backend->kind() == BackendKind::kSm90 || backend->kind() == BackendKind::kSm80) {
      reason = backend->unavailable(Device{DeviceType::kCuda, 0});
      for (const GpuInfo& gpu : gpus()) {
        if (reason.empty()) break;
        reason = backend->unavailable(Device{DeviceType::kCuda, gpu.index});
      }
    }
    result.push_back({backend->kind(), reason.empty(), reason});
  }
  return result;
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> result;
  for (const Backend* backend : all_backends()) {
    const auto listed = backend->kernels();
    result.insert(result.end(), listed.begin(), listed.end());
  }
  return result;
}

}  // namespace moegemm
