#include <limits>
#include <utility>

#include "cuda/backend/launch/segment_params.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/tile/params.h"

namespace moegemm::cuda::sm80 {
namespace {

std::string refuse_dtype(const Gemm& kernel, const Problem& problem) {
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

/// What the kernels that decode W ask of it beyond its format.
std::string refuse_packed(const Gemm& kernel, const Problem& problem) {
  if (!kernel.quantised) return {};
  const Quantization& quantization = problem.quantization;
  if (problem.packed_alignment < kChunkBytes) {
    return "rows of packed weights must be multiples of 16 bytes";
  }
  if (quantization.format == WeightFormat::kNf4 && problem.k % quantization.block_k != 0) {
    return "K = " + std::to_string(problem.k) + " is not a multiple of the block of " +
           std::to_string(quantization.block_k);
  }
  return {};
}

std::string refuse_alignment(const Gemm& kernel, const Problem& problem) {
  if (kernel.loads == Loads::kElements) return {};
  const std::int64_t elements = kChunkBytes / size_bytes(problem.dtype);
  for (const auto& [name, extent] : {std::pair("K", problem.k), std::pair("N", problem.n),
                                     std::pair("low_rank", problem.low_rank)}) {
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

RoutingParams make_routing(const Problem& problem, const Operands& operands) {
  return {segment_params(problem, operands),
          {operands.gather_indices, problem.index_dtype == DType::kInt64},
          operands.router_weights,
          nullptr,
          static_cast<int>(problem.flat_rows()),
          make_fast_divisor(static_cast<std::uint32_t>(problem.gather_divisor())),
          problem.multiply,
          problem.weights_dtype == DType::kFloat32};
}

RowPitch row_pitch(std::int64_t stride, DType dtype) {
  const std::int64_t bytes = stride * size_bytes(dtype);
  unsigned units = 1;
  while (bytes / units > std::numeric_limits<unsigned>::max()) units *= 2;
  return {static_cast<unsigned>(bytes / units), units};
}

std::string refuse_far_apart(const Problem& problem) {
  if (!problem.far_apart) return {};
  return "rows of X and dY must be less than 64 GiB apart and, from 4 GiB on, by a multiple of 16 "
         "bytes";
}

std::string name_of(const Gemm& kernel) {
  const char* op = kernel.op == Op::kForward ? "forward_" : (kernel.op == Op::kDx ? "dx_" : "dw_");
  const char* math =
      kernel.math == Math::kTensor16 ? "" : (kernel.math == Math::kTf32 ? "tf32_" : "fp32_");
  return std::string("sm80_") + op + math + std::to_string(kernel.rows) + "x" +
         std::to_string(kernel.cols) + "x" + std::to_string(kernel.depth()) + "_s" +
         std::to_string(kernel.stages) + (kernel.any_bank ? "_any_bank" : "") +
         (kernel.loads == Loads::kElements ? "_unaligned" : "");
}

std::string refuse(const Gemm& kernel, const KernelEntry& entry, const Problem& problem,
                   const DeviceFacts& facts) {
  if (problem.activation) return "leaves the activation to a pass after it";
  if (std::string reason = refuse_dtype(kernel, problem); !reason.empty()) return reason;
  if (std::string reason = refuse_alignment(kernel, problem); !reason.empty()) return reason;
  if (std::string reason = refuse_packed(kernel, problem); !reason.empty()) return reason;
  if (std::string reason = refuse_far_apart(problem); !reason.empty()) return reason;
  return refuse_size(entry, problem, facts);
}

}  // namespace moegemm::cuda::sm80
