#include <cstdint>
#include <cstdio>

#include "core/registry.h"
#include "graph_timing.h"
#include "testing/device/device_vector.h"
#include "timings.h"

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

TensorView matrix(const testing::Buffer& memory, std::int64_t rows, std::int64_t columns) {
  return TensorView::matrix(memory.data(), kDtype, rows, columns, 0, kGpu);
}

void time_layer(const LayerSize& layer) {
  const std::int64_t rows = kTokens * layer.topk, element = rows * layer.inner * 2;
  const testing::Buffer pre = zeroed(2 * element), act = zeroed(element), d_act = zeroed(element),
                        d_pre = zeroed(2 * element),
                        bias = zeroed(layer.experts * 2 * layer.inner * 2),
                        weights = zeroed(rows * 4), d_weights = zeroed(rows * 4),
                        copied = zeroed(3 * element), source = zeroed(3 * element);
  const testing::DeviceVector sizes(gpu(), DType::kInt32, even_sizes(rows, layer.experts));
  const testing::DeviceVector indices(gpu(), DType::kInt32, shuffled(rows));
  Activation activation;
  if (layer.gpt_oss) {
    activation = {ActivationFunction::kSilu, GateLayout::kInterleaved, 1.702f, 7.0f, 1.0f};
  }
  const TensorView bias_view =
      layer.gpt_oss ? matrix(bias, layer.experts, 2 * layer.inner) : TensorView{};
  const RoutingView routing = {sizes.view(), indices.view(),
                               TensorView::vector(weights.data(), DType::kFloat32, rows, kGpu),
                               layer.topk};
  const ActivationGradientInputs inputs = {
      matrix(d_act, rows, layer.inner), matrix(pre, rows, 2 * layer.inner), bias_view, {}, {}};
  const ActivationGradientOutputs outputs = {
      matrix(d_pre, rows, 2 * layer.inner), matrix(d_act, rows, layer.inner),
      TensorView::vector(d_weights.data(), DType::kFloat32, rows, kGpu)};
  const auto times = round_robin_microseconds(
      {copy(copied, source, element + element / 2),
       [&] {
         cuda_passes().activate(matrix(pre, rows, 2 * layer.inner), bias_view,
                                {sizes.view(), {}, {}, 1}, activation,
                                matrix(act, rows, layer.inner), gpu().context());
       },
       copy(copied, source, 3 * element),
       [&] {
         cuda_passes().activate_backward(inputs, routing, activation, outputs, gpu().context());
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
