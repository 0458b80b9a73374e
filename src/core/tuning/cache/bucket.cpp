#include "core/tuning/cache/bucket.h"

#include <bit>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "core/refusal.h"
#include "core/tuning/cache/kernel_sources.h"
#include "moegemm/info.h"

namespace moegemm {
namespace {

std::string device_name(Device device) {
  if (device.type == DeviceType::kCpu) return cpu_info().model;
  for (const GpuInfo& gpu : gpus()) {
    if (gpu.index == device.index) {
      return join(gpu.name, ", ", gpu.compute_major, ".", gpu.compute_minor, ", ",
                  gpu.multiprocessors, " multiprocessors");
    }
  }
  return to_string(device);
}

/// FNV-1a: the file is read by other builds, so the hash must not depend on the standard library.
class Fingerprint {
 public:
  void add(std::string_view text) {
    for (const char c : text) {
      hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x01000193u;
    }
  }
  std::string hex() const {
    char text[9];
    static_cast<void>(std::snprintf(text, sizeof text, "%08x", hash_));
    return text;
  }

 private:
  std::uint32_t hash_ = 0x811c9dc5u;
};

}  // namespace

std::string problem_bucket(const Problem& problem) {
  // Tokens; with a capacity, of the rows that are expected of it.
  const std::int64_t worth = problem.planned_rows() / problem.topk;
  const std::uint64_t tokens = std::bit_ceil(static_cast<std::uint64_t>(worth > 0 ? worth : 1));
  std::string text =
      join(to_string(problem.op), " ", to_string(problem.dtype), "->", to_string(problem.out_dtype),
           " E=", problem.experts, " N=", problem.n, " K=", problem.k, " topk=", problem.topk,
           " T<=", tokens, " ", to_string(problem.permutation));
  if (!problem.quantization.plain()) text += join(" W=", to_string(problem.quantization));
  if (!problem.batch_invariant) text += " any_order";
  if (problem.multiply) text += " multiply";
  if (problem.accumulate) text += " accumulate";
  if (problem.dy_per_token) text += " dy_per_token";
  if (problem.allow_tf32) text += " tf32";
  if (problem.max_multiprocessors > 0) text += join(" SMs<=", problem.max_multiprocessors);
  if (problem.low_rank > 0) text += join(" low_rank=", problem.low_rank);
  if (problem.bias) text += " bias";
  if (problem.activation) text += join(" activation=", to_string(*problem.activation));
  return join(text, " align=", problem.input_alignment, "/", problem.output_alignment);
}

std::string kernel_set_of(const Backend& backend, std::string_view sources) {
  Fingerprint fingerprint;
  fingerprint.add(sources);
  for (const KernelInfo& kernel : backend.kernels()) {
    fingerprint.add(join(kernel.name, " ", to_string(kernel.op), " ", kernel.tile.rows, " ",
                         kernel.tile.columns, " ", kernel.tile.depth, " ", kernel.stages, "\n"));
  }
  return join(to_string(backend.kind()), " ", fingerprint.hex());
}

std::string kernel_set_of(const Backend& backend) {
  const bool on_cpu =
      backend.kind() == BackendKind::kCpu || backend.kind() == BackendKind::kReference;
  return kernel_set_of(backend, on_cpu ? cpu_kernel_sources() : cuda_kernel_sources());
}

TuningKey tuning_key(const Problem& problem, const Backend& backend) {
  return {device_name(problem.device), version(), kernel_set_of(backend), problem_bucket(problem)};
}

}  // namespace moegemm
