#include <utility>
#include <vector>

#include "core/registry.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm90/kernels.h"

namespace moegemm {
namespace {

const std::vector<const cuda::CudaBackend*>& generations() {
  static const cuda::CudaBackend sm80(cuda::sm80::kGeneration, cuda::sm80::kernels());
#if MOEGEMM_HAS_SM90
  static const cuda::CudaBackend sm90(cuda::sm90::kGeneration, cuda::sm90::kernels());
  static const std::vector all = {&sm90, &sm80};
#else
  static const std::vector all = {&sm80};
#endif
  return all;
}

/// The backend of a GPU and why it gets that one, or why none takes it.
std::pair<std::string, std::string> backend_for(const cuda::DeviceFacts& device) {
  std::string refusals;
  for (const cuda::CudaBackend* backend : generations()) {
    const std::string refusal = backend->unavailable({DeviceType::kCuda, device.ordinal});
    if (refusal.empty()) {
      return {to_string(backend->kind()), "compute capability " + std::to_string(device.major) +
                                              "." + std::to_string(device.minor) + ": " +
                                              backend->generation().summary};
    }
    refusals +=
        (refusals.empty() ? "" : "; ") + std::string(to_string(backend->kind())) + ": " + refusal;
  }
  return {"none (" + refusals + ")", ""};
}

}  // namespace

std::vector<const Backend*> cuda_backends() { return {generations().begin(), generations().end()}; }

std::vector<GpuInfo> query_gpus(std::string* why_none) {
  std::vector<GpuInfo> gpus;
  for (int ordinal = 0; ordinal < cuda::device_count(); ++ordinal) {
    const cuda::DeviceFacts& device = *cuda::device_facts(ordinal);
    auto [backend, why] = backend_for(device);
    gpus.push_back({device.ordinal, device.name, device.major, device.minor, device.multiprocessors,
                    device.memory_bytes, device.shared_memory_bytes, std::move(backend),
                    std::move(why)});
  }
  if (why_none) *why_none = cuda::why_no_device();
  return gpus;
}

}  // namespace moegemm
