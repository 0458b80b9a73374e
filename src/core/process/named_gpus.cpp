#include "core/process/named_gpus.h"

#include <array>

#include "moegemm/plan.h"

namespace moegemm {
namespace {

constexpr std::int64_t kKi = 1024;
constexpr std::int64_t kMi = 1024 * kKi;

/// As the CUDA runtime reports them; the bandwidth is memory clock times bus width.
constexpr std::array kGpus = {
    NamedGpu{"h200", "NVIDIA H200", 9, 0, 132, 227 * kKi, 228 * kKi, 60 * kMi, 1.980e9, 4.814e12},
    NamedGpu{"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 227 * kKi, 228 * kKi, 50 * kMi, 1.980e9,
             3.352e12},
    NamedGpu{"h100-pcie", "NVIDIA H100 PCIe", 9, 0, 114, 227 * kKi, 228 * kKi, 50 * kMi, 1.755e9,
             2.039e12},
    NamedGpu{"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 * kKi, 164 * kKi, 40 * kMi, 1.410e9,
             2.039e12},
    NamedGpu{"l40s", "NVIDIA L40S", 8, 9, 142, 99 * kKi, 100 * kKi, 96 * kMi, 2.520e9, 0.864e12},
    NamedGpu{"a10", "NVIDIA A10", 8, 6, 72, 99 * kKi, 100 * kKi, 6 * kMi, 1.695e9, 0.600e12},
    NamedGpu{"rtx-4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 99 * kKi, 100 * kKi, 72 * kMi,
             2.520e9, 1.008e12},
    NamedGpu{"rtx-3090", "NVIDIA GeForce RTX 3090", 8, 6, 82, 99 * kKi, 100 * kKi, 6 * kMi, 1.695e9,
             0.936e12},
};

}  // namespace

std::span<const NamedGpu> named_gpus() { return kGpus; }

const NamedGpu* named_gpu(int device_index) {
  const int i = device_index - kFirstNamedGpu;
  return i >= 0 && i < static_cast<int>(kGpus.size()) ? &kGpus[static_cast<std::size_t>(i)]
                                                      : nullptr;
}

std::vector<std::string> planning_gpus() {
  std::vector<std::string> names;
  for (const NamedGpu& gpu : kGpus) names.emplace_back(gpu.name);
  return names;
}

std::optional<Device> planning_gpu(const std::string& name) {
  for (std::size_t i = 0; i < kGpus.size(); ++i) {
    if (kGpus[i].name == name) {
      return Device{DeviceType::kCuda, kFirstNamedGpu + static_cast<int>(i)};
    }
  }
  return std::nullopt;
}

}  // namespace moegemm
