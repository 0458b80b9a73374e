#include "cuda/sm80/plan/compiled_kernel.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/host/loading.h"
#include "cuda/sm80/plan/instance.h"
#include "cuda/sm80/row_gemm/traits.h"
#include "cuda/sm80/weight_gemm/traits.h"

namespace moegemm::cuda::sm80 {
namespace {

constexpr int kMost = std::numeric_limits<int>::max() / 2;

const char* name_of(Op op) {
  return op == Op::kForward ? "forward" : (op == Op::kDx ? "dx" : "dw");
}

const char* tag_of(Math math) {
  return math == Math::kTensor16 ? "" : (math == Math::kTf32 ? "tf32_" : "fp32_");
}

template <Op O, Math M, Loads L, typename Shape>
CompiledKernel compiled(int least_major, int most_major) {
  constexpr int kElementBytes = M == Math::kTensor16 ? 2 : 4;
  constexpr int kDepth = Shape::template depth<kElementBytes>();
  CompiledKernel kernel;
  kernel.info.backend = BackendKind::kSm80;
  kernel.info.op = O;
  kernel.info.tile = {Shape::kRows, Shape::kCols, kDepth};
  kernel.info.stages = Shape::kStages;
  kernel.info.name = std::string("sm80_") + name_of(O) + "_" + tag_of(M) +
                     std::to_string(Shape::kRows) + "x" + std::to_string(Shape::kCols) + "x" +
                     std::to_string(kDepth) + "_s" + std::to_string(Shape::kStages) +
                     (L == Loads::kElements ? "_unaligned" : "");
  kernel.math = M;
  kernel.loads = L;
  kernel.least_major = least_major;
  kernel.most_major = most_major;
  kernel.threads = Shape::kThreads;
  kernel.copies_apart = Shape::kLoadWarps > 0;
  kernel.blocks_per_multiprocessor = Shape::kBlocksPerMultiprocessor;
  if constexpr (O == Op::kDw) {
    kernel.smem_bytes = &WeightGemmLayout<Shape, kElementBytes>::total;
  } else {
    kernel.smem_bytes = &RowGemmLayout<Shape>::total;
  }
  if constexpr (M == Math::kTensor16) {
    kernel.functions[0] = kernel_function<O, M, L, Shape, DType::kBFloat16>();
    kernel.functions[1] = kernel_function<O, M, L, Shape, DType::kFloat16>();
  } else {
    kernel.functions[0] = kernel_function<O, M, L, Shape, DType::kFloat32>();
  }
  return kernel;
}

std::int64_t tiles(std::int64_t extent, int tile) { return (extent + tile - 1) / tile; }

std::string refuse_dtype(const CompiledKernel& kernel, const Problem& problem) {
  const bool fp32 = problem.dtype == DType::kFloat32;
  if (kernel.math == Math::kTensor16 && fp32) return "is compiled for bf16 and fp16";
  if (kernel.math != Math::kTensor16 && !fp32) return "is compiled for fp32";
  // One kernel family for each setting: bits must not depend on which tile is chosen.
  if (kernel.math == Math::kTf32 && !problem.allow_tf32) return "TF32 is not allowed";
  if (kernel.math == Math::kFloat && problem.allow_tf32) return "TF32 is allowed";
  if (problem.out_dtype != problem.dtype && problem.out_dtype != DType::kFloat32) {
    return std::string("the output is ") + to_string(problem.out_dtype) + ", must be " +
           to_string(problem.dtype) + " or fp32";
  }
  return {};
}

std::string refuse_alignment(const CompiledKernel& kernel, const Problem& problem) {
  if (kernel.loads == Loads::kElements) return {};
  const std::int64_t elements = kChunkBytes / size_bytes(problem.dtype);
  for (const auto& [name, extent] : {std::pair("K", problem.k), std::pair("N", problem.n)}) {
    if (extent % elements != 0) {
      return std::string(name) + " = " + std::to_string(extent) + " is not a multiple of " +
             std::to_string(elements);
    }
  }
  if (problem.input_alignment < kChunkBytes || problem.output_alignment < kChunkBytes) {
    return "base addresses and row pitches must be multiples of 16 bytes";
  }
  return {};
}

}  // namespace

std::span<const CompiledKernel> compiled_kernels() {
  static const std::vector<CompiledKernel> all = {
#define MOEGEMM_SM80_KERNEL(op, math, loads, ...) \
  compiled<Op::op, Math::math, Loads::loads, BlockShape<__VA_ARGS__>>(8, kAnyMajor),
#define MOEGEMM_SM80_KERNEL_90(op, math, loads, ...) \
  compiled<Op::op, Math::math, Loads::loads, BlockShape<__VA_ARGS__>>(9, kAnyMajor),
#define MOEGEMM_SM80_KERNEL_90A(op, math, loads, ...) \
  compiled<Op::op, Math::math, Loads::loads, BlockShape<__VA_ARGS__>>(9, 9),
#include "cuda/instances/sm80_kernels.inc"
#undef MOEGEMM_SM80_KERNEL
#undef MOEGEMM_SM80_KERNEL_90
#undef MOEGEMM_SM80_KERNEL_90A
  };
  return all;
}

namespace {

std::vector<const void*> aligned_16_bit_kernels() {
  std::vector<const void*> functions;
  for (const CompiledKernel& kernel : compiled_kernels()) {
    if (kernel.math != Math::kTensor16 || kernel.loads != Loads::kVectors) continue;
    if (kernel.least_major > 8) continue;
    functions.insert(functions.end(), {kernel.functions[0], kernel.functions[1]});
  }
  return functions;
}

// Where the sm90 backend does not run.
const ListedKernels on_older_gpus(aligned_16_bit_kernels, 8, 8);
const ListedKernels on_newer_gpus(aligned_16_bit_kernels, 10, 1000);

}  // namespace

std::int64_t most_tiles(const CompiledKernel& kernel, const Problem& problem) {
  const TileShape& tile = kernel.info.tile;
  if (problem.op == Op::kDw) {
    return problem.experts * tiles(problem.n, tile.rows) * tiles(problem.k, tile.cols);
  }
  const std::int64_t features = problem.op == Op::kForward ? problem.n : problem.k;
  const std::int64_t row_tiles = std::min(problem.experts, problem.rows) + problem.rows / tile.rows;
  return row_tiles * tiles(features, tile.cols);
}

int resident_blocks(const CompiledKernel& kernel, const Problem& problem,
                    const DeviceFacts& facts) {
  constexpr std::int64_t kReserved = 1024;  // shared memory that the system takes for each block
  const std::int64_t smem = kernel.smem_bytes(problem.experts) + kReserved;
  return static_cast<int>(std::clamp<std::int64_t>(facts.multiprocessor_shared_memory_bytes / smem,
                                                   1, kernel.blocks_per_multiprocessor));
}

LaunchPolicy policy(const CompiledKernel& kernel, const Problem& problem,
                    const DeviceFacts& facts) {
  const int most = facts.multiprocessors * resident_blocks(kernel, problem, facts);
  LaunchPolicy policy;
  policy.grid = static_cast<int>(std::clamp<std::int64_t>(most_tiles(kernel, problem), 1, most));
  const std::int64_t rows = problem.rows / std::max<std::int64_t>(problem.experts, 1);
  const std::int64_t element_bytes = size_bytes(problem.dtype);
  if (problem.op == Op::kDw) {
    const bool along_k = k_tiles_first(rows, problem.n, problem.k, element_bytes, facts.l2_bytes);
    policy.order = along_k ? TileOrder::kAlongColumns : TileOrder::kAlongRows;
  } else {
    const std::int64_t depth = problem.op == Op::kForward ? problem.k : problem.n;
    if (full_tiles_first(rows, depth, element_bytes, facts.l2_bytes)) {
      policy.order = TileOrder::kFullTilesFirst;
    }
  }
  return policy;
}

std::string refuse(const CompiledKernel& kernel, const Problem& problem, const DeviceFacts& facts) {
  if (problem.op != kernel.info.op) {
    return std::string("computes ") + to_string(kernel.info.op) + " only";
  }
  if (problem.activation) return "leaves the activation to a pass behind it";
  if (facts.major < kernel.least_major) {
    return "is compiled for compute capability " + std::to_string(kernel.least_major) +
           ".0 and newer";
  }
  if (facts.major > kernel.most_major) {
    return "is compiled for compute capability " + std::to_string(kernel.most_major) + ".0 only";
  }
  if (std::string reason = refuse_dtype(kernel, problem); !reason.empty()) return reason;
  if (std::string reason = refuse_alignment(kernel, problem); !reason.empty()) return reason;
  if (problem.rows > kMost || problem.slots > kMost || problem.n > kMost || problem.k > kMost ||
      problem.experts > kMost) {
    return "M, N, K and E must be below 2^30";
  }
  // Tile numbers, and a block's overshoot of them, must fit 32 bits.
  if (most_tiles(kernel, problem) > kMost) return "more than 2^30 output tiles";
  const std::int64_t smem = kernel.smem_bytes(problem.experts);
  if (smem > facts.shared_memory_bytes) {
    return std::to_string(problem.experts) + " experts need " + std::to_string(smem) +
           " bytes of shared memory, a block has " + std::to_string(facts.shared_memory_bytes);
  }
  return {};
}

}  // namespace moegemm::cuda::sm80
