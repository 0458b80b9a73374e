#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "core/registry.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/tensor_map.h"
#include "cuda/backend/tile_counters.h"
#include "graph_timing.h"
#include "testing/device/cuda_graph.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/random.h"
#include "timings.h"

namespace moegemm::cuda {
namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};

void time_route(std::int64_t tokens, std::int64_t topk, std::int64_t experts, DType dtype) {
  const std::int64_t rows = tokens * topk;
  testing::Random random(7);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(rows));
  for (std::int64_t& id : ids) id = random.below(experts);
  const testing::DeviceVector device_ids(gpu(), dtype, ids), sizes(gpu(), dtype, experts),
      indices(gpu(), dtype, rows), inverse(gpu(), dtype, rows);
  const testing::Buffer workspace = zeroed(cuda_passes().route_workspace_bytes(rows, experts) + 4);
  const double us = graph_microseconds(
      [&] {
        cuda_passes().route(
            TensorView::matrix(device_ids.view().data, dtype, tokens, topk, 0, kGpu), experts,
            sizes.view(), indices.view(), inverse.view(), workspace.data(), gpu().context());
      },
      50);
  std::printf("route      %6ld x %-2ld over %4ld experts, %s: %6.2f us\n",
              static_cast<long>(tokens), static_cast<long>(topk), static_cast<long>(experts),
              to_string(dtype), us);
}

void time_combine(std::int64_t tokens, std::int64_t topk, std::int64_t cols, DType dtype,
                  DType out_dtype, double copy_gbs) {
  const testing::Buffer rows = zeroed(tokens * topk * cols * size_bytes(dtype)),
                        weights = zeroed(tokens * topk * 4),
                        out = zeroed(tokens * cols * size_bytes(out_dtype));
  const double us = graph_microseconds(
      [&] {
        cuda_passes().combine(
            TensorView::matrix(rows.data(), dtype, tokens * topk, cols, 0, kGpu),
            TensorView::vector(weights.data(), DType::kFloat32, tokens * topk, kGpu), {}, topk,
            TensorView::matrix(out.data(), out_dtype, tokens, cols, 0, kGpu), gpu().context());
      },
      5);
  const double bytes = static_cast<double>(tokens * cols) *
                       static_cast<double>(topk * size_bytes(dtype) + size_bytes(out_dtype));
  std::printf("combine    %6ld x %-2ld x %5ld %s -> %s: %8.2f us, %5.0f GB/s, %.2f of copy\n",
              static_cast<long>(tokens), static_cast<long>(topk), static_cast<long>(cols),
              to_string(dtype), to_string(out_dtype), us, bytes / us / 1e3,
              bytes / us / 1e3 / copy_gbs);
}

void time_scale_rows(std::int64_t count, std::int64_t cols, DType dtype, bool with_x,
                     double copy_gbs) {
  const std::int64_t bytes_each = count * cols * size_bytes(dtype);
  const testing::Buffer product = zeroed(bytes_each), x = zeroed(bytes_each),
                        scaled = zeroed(bytes_each), scaled_x = zeroed(bytes_each),
                        weights = zeroed(count * 4), dot = zeroed(count * 4);
  const testing::DeviceVector sizes(gpu(), DType::kInt32, even_sizes(count, 128));
  const testing::DeviceVector indices(gpu(), DType::kInt32, shuffled(count));
  const auto matrix = [&](const testing::Buffer& memory) {
    return TensorView::matrix(memory.data(), dtype, count, cols, 0, kGpu);
  };
  const RoutingView routing = {sizes.view(), indices.view(),
                               TensorView::vector(weights.data(), DType::kFloat32, count, kGpu), 1};
  const double us = graph_microseconds(
      [&] {
        cuda_passes().scale_rows(matrix(product), matrix(x), routing, matrix(scaled),
                                 TensorView::vector(dot.data(), DType::kFloat32, count, kGpu),
                                 with_x ? matrix(scaled_x) : TensorView{}, gpu().context());
      },
      5);
  const double bytes = static_cast<double>(bytes_each) * (with_x ? 4 : 3);
  std::printf("scale_rows %6ld x %5ld %s%s: %8.2f us, %5.0f GB/s, %.2f of copy\n",
              static_cast<long>(count), static_cast<long>(cols), to_string(dtype),
              with_x ? " and x" : "", us, bytes / us / 1e3, bytes / us / 1e3 / copy_gbs);
}

/// Bytes read and written by a device-to-device copy, per nanosecond.
double copy_bandwidth() {
  const std::int64_t bytes = std::int64_t{1} << 28;
  const testing::Buffer from = zeroed(bytes), to = zeroed(bytes);
  const double us = graph_microseconds(copy(to, from, bytes), 5);
  return 2.0 * static_cast<double>(bytes) / us / 1e3;
}

template <typename Call>
double nanoseconds_per_call(const Call& call) {
  constexpr int kCalls = 20000;
  call();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin)
             .count() /
         kCalls;
}

}  // namespace

void time_passes() {
  const double copied = copy_bandwidth();
  std::printf("copy       %.0f GB/s\n", copied);
  for (const std::int64_t tokens : {1, 16, 64, 512, 1024, 4096, 8192, 32768}) {
    time_route(tokens, 8, 128, DType::kInt32);
  }
  time_route(8192, 8, 128, DType::kInt64);
  time_route(8192, 8, 256, DType::kInt32);
  time_route(8192, 10, 512, DType::kInt32);
  time_route(8192, 8, 1024, DType::kInt32);
  time_route(8192, 2, 8, DType::kInt32);
  time_combine(8192, 8, 2048, DType::kBFloat16, DType::kBFloat16, copied);
  time_combine(8192, 8, 2048, DType::kBFloat16, DType::kFloat32, copied);
  time_combine(8192, 4, 2880, DType::kBFloat16, DType::kBFloat16, copied);
  time_combine(8192, 2, 4096, DType::kBFloat16, DType::kBFloat16, copied);
  time_combine(8192, 8, 7168, DType::kFloat16, DType::kFloat16, copied);
  time_combine(8192, 8, 2048, DType::kFloat32, DType::kFloat32, copied);
  time_combine(8192, 8, 2047, DType::kBFloat16, DType::kBFloat16, copied);
  time_scale_rows(65536, 2048, DType::kBFloat16, false, copied);
  time_scale_rows(65536, 2048, DType::kBFloat16, true, copied);
  time_scale_rows(65536, 768, DType::kBFloat16, false, copied);
}

void time_host_layer() {
  const std::unique_ptr<testing::Memory> second_stream = testing::another_cuda_stream();
  const cudaStream_t first = testing::stream_of(gpu()), second = testing::stream_of(*second_stream);
  std::printf("acquire_tile_counter, one stream: %.0f ns\n",
              nanoseconds_per_call([&] { acquire_tile_counter(0, first); }));
  std::printf("acquire_tile_counter, two streams in turn: %.0f ns\n",
              nanoseconds_per_call([&] {
                acquire_tile_counter(0, first);
                acquire_tile_counter(0, second);
              }) / 2);
  const testing::Buffer memory = zeroed(1 << 20);
  TensorMapSpec spec;
  spec.base = memory.data();
  spec.rank = 3;
  spec.dims = {64, 128, 8};
  spec.strides_bytes = {128, 128 * 128};
  spec.box = {64, 128, 1};
  std::printf("encode a tensor map: %.0f ns\n", nanoseconds_per_call([&] { encode(spec); }));
}

}  // namespace moegemm::cuda
