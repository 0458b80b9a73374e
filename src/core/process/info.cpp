#include "moegemm/info.h"

#include <algorithm>

#include "core/refusal.h"
#include "core/registry.h"

namespace moegemm {

namespace {

/// Empty if some device of this machine runs the backend, the CPU or any GPU; else the reason of
/// the first device of its type.
std::string why_unavailable(const Backend& backend) {
  const BackendKind kind = backend.kind();
  if (kind == BackendKind::kReference || kind == BackendKind::kCpu) {
    return backend.unavailable(Device{DeviceType::kCpu, 0});
  }
  std::string first_reason = backend.unavailable(Device{DeviceType::kCuda, 0});
  for (const GpuInfo& gpu : gpus()) {
    if (backend.unavailable(Device{DeviceType::kCuda, gpu.index}).empty()) return {};
  }
  return first_reason;
}

}  // namespace

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
  for (const auto& entry : kBackends) {
    const BackendKind kind = entry.value;
    const auto all = all_backends();
    const auto found = std::find_if(
        all.begin(), all.end(), [kind](const Backend* backend) { return backend->kind() == kind; });
    const std::string reason = found == all.end() ? std::string("not compiled into this library")
                                                  : why_unavailable(**found);
    result.push_back({kind, reason.empty(), reason});
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
