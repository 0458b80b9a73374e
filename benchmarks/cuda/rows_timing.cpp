#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "core/registry.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/tile_counters.h"
#include "device_buffer.h"
#include "graph_timing.h"
#include "rows_check.h"

namespace moegemm::cuda {
namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};

void time_route(std::int64_t tokens, std::int64_t topk, std::int64_t experts, DType dtype) {
  const std::int64_t rows = tokens * topk;
  std::mt19937_64 random(7);
  MirroredBytes ids(static_cast<std::size_t>(rows * size_bytes(dtype)));
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto id = static_cast<std::int64_t>(random() % static_cast<unsigned long>(experts));
    if (dtype == DType::kInt64) {
      reinterpret_cast<std::int64_t*>(ids.host())[i] = id;
    } else {
      reinterpret_cast<std::int32_t*>(ids.host())[i] = static_cast<std::int32_t>(id);
    }
  }
  ids.upload();
  const DeviceMemory sizes(experts * 8), indices(rows * 8), inverse(rows * 8),
      workspace(cuda_row_kernels().route_workspace_bytes(rows, experts) + 4);
  const double us = graph_microseconds(
      [&](cudaStream_t stream) {
        cuda_row_kernels().route(TensorView::matrix(ids.device(), dtype, tokens, topk, 0, kGpu),
                                 experts, TensorView::vector(sizes.get(), dtype, experts, kGpu),
                                 TensorView::vector(indices.get(), dtype, rows, kGpu),
                                 TensorView::vector(inverse.get(), dtype, rows, kGpu),
                                 workspace.get(), {stream, nullptr});
      },
      50);
  std::printf("route      %6ld x %-2ld over %4ld experts, %s: %6.2f us\n",
              static_cast<long>(tokens), static_cast<long>(topk), static_cast<long>(experts),
              to_string(dtype), us);
}

void time_combine(std::int64_t tokens, std::int64_t topk, std::int64_t cols, DType dtype,
                  DType out_dtype, double copy_gbs) {
  const DeviceMemory rows(tokens * topk * cols * size_bytes(dtype)), weights(tokens * topk * 4),
      out(tokens * cols * size_bytes(out_dtype));
  const double us = graph_microseconds(
      [&](cudaStream_t stream) {
        cuda_row_kernels().combine(
            TensorView::matrix(rows.get(), dtype, tokens * topk, cols, 0, kGpu),
            TensorView::vector(weights.get(), DType::kFloat32, tokens * topk, kGpu), topk,
            TensorView::matrix(out.get(), out_dtype, tokens, cols, 0, kGpu), {stream, nullptr});
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
  const DeviceMemory product(bytes_each), x(bytes_each), scaled(bytes_each), scaled_x(bytes_each),
      weights(count * 4), dot(count * 4);
  MirroredBytes sizes(128 * 4), indices(static_cast<std::size_t>(count * 4));
  for (int e = 0; e < 128; ++e) {
    reinterpret_cast<std::int32_t*>(sizes.host())[e] = static_cast<std::int32_t>(count / 128);
  }
  for (std::int64_t r = 0; r < count; ++r) {
    reinterpret_cast<std::int32_t*>(indices.host())[r] =
        static_cast<std::int32_t>(r * 40503 % count);
  }
  sizes.upload();
  indices.upload();
  const auto matrix = [&](const DeviceMemory& memory) {
    return TensorView::matrix(memory.get(), dtype, count, cols, 0, kGpu);
  };
  const RoutingView routing = {TensorView::vector(sizes.device(), DType::kInt32, 128, kGpu),
                               TensorView::vector(indices.device(), DType::kInt32, count, kGpu),
                               TensorView::vector(weights.get(), DType::kFloat32, count, kGpu), 1};
  const double us = graph_microseconds(
      [&](cudaStream_t stream) {
        cuda_row_kernels().scale_rows(matrix(product), matrix(x), routing, matrix(scaled),
                                      TensorView::vector(dot.get(), DType::kFloat32, count, kGpu),
                                      with_x ? matrix(scaled_x) : TensorView{}, {stream, nullptr});
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
  const DeviceMemory from(bytes), to(bytes);
  const double us = graph_microseconds(
      [&](cudaStream_t stream) {
        check(cudaMemcpyAsync(to.get(), from.get(), static_cast<std::size_t>(bytes),
                              cudaMemcpyDeviceToDevice, stream),
              "copy");
      },
      5);
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

void time_rows() {
  const double copy = copy_bandwidth();
  std::printf("copy       %.0f GB/s\n", copy);
  for (const std::int64_t tokens : {1, 16, 64, 512, 1024, 4096, 8192, 32768}) {
    time_route(tokens, 8, 128, DType::kInt32);
  }
  time_route(8192, 8, 128, DType::kInt64);
  time_route(8192, 8, 256, DType::kInt32);
  time_route(8192, 10, 512, DType::kInt32);
  time_route(8192, 8, 1024, DType::kInt32);
  time_route(8192, 2, 8, DType::kInt32);
  time_combine(8192, 8, 2048, DType::kBFloat16, DType::kBFloat16, copy);
  time_combine(8192, 8, 2048, DType::kBFloat16, DType::kFloat32, copy);
  time_combine(8192, 4, 2880, DType::kBFloat16, DType::kBFloat16, copy);
  time_combine(8192, 2, 4096, DType::kBFloat16, DType::kBFloat16, copy);
  time_combine(8192, 8, 7168, DType::kFloat16, DType::kFloat16, copy);
  time_combine(8192, 8, 2048, DType::kFloat32, DType::kFloat32, copy);
  time_combine(8192, 8, 2047, DType::kBFloat16, DType::kBFloat16, copy);
  time_scale_rows(65536, 2048, DType::kBFloat16, false, copy);
  time_scale_rows(65536, 2048, DType::kBFloat16, true, copy);
  time_scale_rows(65536, 768, DType::kBFloat16, false, copy);
}

void time_host_layer() {
  cudaStream_t first, second;
  check(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), "create a stream");
  check(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "create a stream");
  std::printf("acquire_tile_counter, one stream: %.0f ns\n",
              nanoseconds_per_call([&] { acquire_tile_counter(0, first); }));
  std::printf("acquire_tile_counter, two streams in turn: %.0f ns\n",
              nanoseconds_per_call([&] {
                acquire_tile_counter(0, first);
                acquire_tile_counter(0, second);
              }) / 2);
  const DeviceMemory memory(1 << 20);
  TensorMapSpec spec;
  spec.base = memory.get();
  spec.rank = 3;
  spec.dims = {64, 128, 8};
  spec.strides_bytes = {128, 128 * 128};
  spec.box = {64, 128, 1};
  std::printf("encode a tensor map: %.0f ns\n", nanoseconds_per_call([&] { encode(spec); }));
  check(cudaStreamDestroy(first), "destroy a stream");
  check(cudaStreamDestroy(second), "destroy a stream");
}

}  // namespace moegemm::cuda
