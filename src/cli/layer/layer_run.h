#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layer/oracle.h"
#include "layer/token_routing.h"
#include "moegemm/ops.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"
#include "moegemm/tensor.h"

namespace moegemm::testing {
class Memory;
}

namespace moegemm::cli {

class Progress;

/// One MoE layer and how to run it.
struct LayerSpec {
  std::string name;
  std::int64_t experts = 0;
  std::int64_t topk = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t tokens = 0;
  DType dtype = DType::kBFloat16;
  WeightFormat weights = WeightFormat::kPlain;  ///< quantised weights are frozen: there is no dW
  RoutingPattern pattern = RoutingPattern::kUniform;
  std::uint64_t seed = 0;
  Device device;
  int repeat = 1;
  std::optional<BackendKind> backend;
  std::optional<double> tolerance;

  std::int64_t rows() const { return tokens * topk; }
};

struct OpReport {
  std::string op;
  std::optional<Plan> plan;  ///< of a matrix product; the memory-bound operations have none
  double median_ms = 0;
  double best_ms = 0;
  double flops = 0;  ///< 0 for the memory-bound operations
  CheckResult check;

  double gflops() const { return flops / median_ms * 1e-6; }
};

/// Which matrix product of the layer: the first reads tokens and gives gate and up projection side
/// by side (N = 2 * intermediate, K = hidden), the second comes back (N = hidden, K =
/// intermediate).
enum class LayerGemm { kFirst, kSecond };

/// How W of [n, k] is quantised where the layer says so, each format as most checkpoints have it.
Quantization quantization_of(const LayerSpec& spec, std::int64_t n, std::int64_t k);

/// Forward and dX, and dW unless the weights are frozen.
std::vector<Op> trained_ops(const LayerSpec& spec);

/// The problem that `run_layer` poses for one product.
Problem layer_problem(const LayerSpec& spec, LayerGemm gemm, Op op);

/// The options of a call that poses this problem.
GemmOptions options_of(const Problem& problem, const LayerSpec& spec);

/// Device memory that `run_layer` needs at its peak. A layer that exists in nobody's memory has
/// more bytes than 64 bits count.
double layer_bytes(const LayerSpec& spec);

/// Of `run_layer`.
inline int layer_ops(const LayerSpec& spec) {
  return spec.weights == WeightFormat::kPlain ? 10 : 8;
}
/// Routes, runs and checks every operation of the layer's forward and backward pass. The activation
/// between the two products is not part of the library, so each product has random inputs of its
/// own; outputs are poisoned first.
std::vector<OpReport> run_layer(const LayerSpec& spec, testing::Memory& memory, Progress& progress);

}  // namespace moegemm::cli
