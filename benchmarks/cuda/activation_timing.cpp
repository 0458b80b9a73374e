#include <cstdint>
#include <cstdio>

#include "core/registry.h"
#include "device_buffer.h"
#include "graph_timing.h"
#include "rows_check.h"

/// The activation and its backward against copies of as many bytes, which take turns with them.
namespace moegemm::cuda {
namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};
constexpr DType kDtype = DType::kBFloat16;
constexpr std::int64_t kTokens = 8192;

struct LayerSize {
  const char* name;
  std::int64_t experts, topk, inner;
  bool gpt_oss = false;  ///< interleaved, clamped, with a bias
};

constexpr LayerSize kLayers[] = {
    {"qwen3-30b-a3b", 128, 8, 768},       {"mixtral-8x7b", 8, 2, 14336},
    {"deepseek-v3", 256, 8, 2048},        {"qwen3-next-80b-a3b", 512, 10, 512},
    {"gpt-oss-120b", 128, 4, 2880, true}, {"olmoe", 64, 8, 1024},
};

TensorView matrix(const DeviceMemory& memory, std::int64_t rows, std::int64_t columns) {
  return TensorView::matrix(memory.get(), kDtype, rows, columns, 0, kGpu);
}

StreamCall copy(const DeviceMemory& to, const DeviceMemory& from, std::int64_t bytes) {
  return [&to, &from, bytes](cudaStream_t stream) {
    check(cudaMemcpyAsync(to.get(), from.get(), static_cast<std::size_t>(bytes),
                          cudaMemcpyDeviceToDevice, stream),
          "copy");
  };
}

void time_layer(const LayerSize& layer) {
  const std::int64_t rows = kTokens * layer.topk, element = rows * layer.inner * 2;
  const DeviceMemory pre(2 * element), act(element), d_act(element), d_pre(2 * element),
      bias(layer.experts * 2 * layer.inner * 2), weights(rows * 4), d_weights(rows * 4),
      copied(3 * element), source(3 * element);
  MirroredBytes sizes(static_cast<std::size_t>(layer.experts * 4)),
      indices(static_cast<std::size_t>(rows * 4));
  for (std::int64_t e = 0; e < layer.experts; ++e) {
    reinterpret_cast<std::int32_t*>(sizes.host())[e] =
        static_cast<std::int32_t>(rows * (e + 1) / layer.experts - rows * e / layer.experts);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    reinterpret_cast<std::int32_t*>(indices.host())[r] =
        static_cast<std::int32_t>(r * 40503 % rows);
  }
  sizes.upload();
  indices.upload();
  Activation activation;
  if (layer.gpt_oss) {
    activation = {ActivationFunction::kSilu, GateLayout::kInterleaved, 1.702f, 7.0f, 1.0f};
  }
  const TensorView m_sizes = TensorView::vector(sizes.device(), DType::kInt32, layer.experts, kGpu);
  const TensorView bias_view =
      layer.gpt_oss ? matrix(bias, layer.experts, 2 * layer.inner) : TensorView{};
  const RoutingView routing = {
      m_sizes, TensorView::vector(indices.device(), DType::kInt32, rows, kGpu),
      TensorView::vector(weights.get(), DType::kFloat32, rows, kGpu), layer.topk};
  const ActivationGradientInputs inputs = {
      matrix(d_act, rows, layer.inner), matrix(pre, rows, 2 * layer.inner), bias_view, {}, {}};
  const ActivationGradientOutputs outputs = {
      matrix(d_pre, rows, 2 * layer.inner), matrix(d_act, rows, layer.inner),
      TensorView::vector(d_weights.get(), DType::kFloat32, rows, kGpu)};
  const auto times = round_robin_microseconds(
      {copy(copied, source, element + element / 2),
       [&](cudaStream_t stream) {
         cuda_row_kernels().activate(matrix(pre, rows, 2 * layer.inner), bias_view, m_sizes,
                                     activation, matrix(act, rows, layer.inner), {stream, nullptr});
       },
       copy(copied, source, 3 * element),
       [&](cudaStream_t stream) {
         cuda_row_kernels().activate_backward(inputs, routing, activation, outputs,
                                              {stream, nullptr});
       }},
      3);
  const auto print = [&](const char* what, double us, double copy_us, double bytes) {
    std::printf("%-18s %-20s %8.2f us, %5.0f GB/s, %.2f of a copy\n", what, layer.name, us,
                bytes / us / 1e3, copy_us / us);
  };
  print("activate", times[1], times[0], 3.0 * static_cast<double>(element));
  print("activate_backward", times[3], times[2], 6.0 * static_cast<double>(element));
}

}  // namespace

void time_activation() {
  for (const LayerSize& layer : kLayers) {
    time_layer(layer);
  }
}

}  // namespace moegemm::cuda
