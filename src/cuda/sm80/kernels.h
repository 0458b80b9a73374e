#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cuda/backend/cuda_backend.h"
#include "cuda/device/row_pitch.h"
#include "cuda/sm80/tile/traits.h"

/// What the host knows of the kernels in row_gemm/ and weight_gemm/.
namespace moegemm::cuda::sm80 {

std::vector<KernelEntry> row_gemm_kernels();     ///< forward and dX
std::vector<KernelEntry> weight_gemm_kernels();  ///< dW
/// Forward of quantised weights and few rows, which every backend of these GPUs lists as its own.
std::vector<KernelEntry> stream_gemm_kernels(BackendKind backend);
std::vector<KernelEntry> kernels();  ///< all of them

extern const Generation kGeneration;

/// Whether kernels compiled for the comma-separated `archs`, ascending ("80,90", "86,90a"), run on
/// a GPU of compute capability major.minor: the first one is there as PTX too, which any newer GPU
/// can compile.
bool runs_on(std::string_view archs, int major, int minor);

/// What this library was compiled for, as above.
std::string_view compiled_archs();

/// Floating-point operations that a multiprocessor does in a clock for this problem's dtype and
/// TF32 setting, as mma.sync and fmaf reach them.
double flops_per_clock(const Problem& problem, int major, int minor);

struct RoutingParams;
RoutingParams make_routing(const Problem& problem, const Operands& operands);

/// All but what depends on the kernel: the order of tiles, and blocks of the low-rank part.
struct RowGemmParams;
RowGemmParams make_row_params(const Problem& problem, const Operands& operands);

/// The pitch of rows that are `stride` elements apart, which Problem::far_apart is not about.
RowPitch row_pitch(std::int64_t stride, DType dtype);
/// The refusal of a problem that it is about, empty for others.
std::string refuse_far_apart(const Problem& problem);

std::string name_of(const Gemm& kernel);

/// KernelEntry::refuse of both families.
std::string refuse(const Gemm& kernel, const KernelEntry& entry, const Problem& problem,
                   const DeviceFacts& facts);

/// The entry of a kernel but for its tiles, grid and launch. Layout::total(experts) are its bytes
/// of shared memory, Functions{}.operator()<D>() its compiled variants for an element type.
template <Gemm Kernel, typename Layout, typename Functions>
KernelEntry entry_of(Functions) {
  using Shape = ShapeOf<Kernel>;
  constexpr bool kTensor16 = Kernel.math == Math::kTensor16;
  using Formats = std::conditional_t<kTensor16, TensorCoreFormats, cuda::Formats<DType::kFloat32>>;
  KernelEntry entry = {
      .info = {.backend = BackendKind::kSm80,
               .name = name_of(Kernel),
               .op = Kernel.op,
               .tile = {Shape::kRows, Shape::kCols, Kernel.depth()},
               .stages = Shape::kStages},
      .arch = Kernel.arch,
      .exact = Kernel.exact,
      .threads = Shape::kThreads,
      .blocks_per_multiprocessor = Shape::kBlocksPerMultiprocessor,
      .copies_apart = Shape::kLoadWarps > 0,
      .any_alignment = Kernel.loads == Loads::kElements,
      .smem_bytes = [](const Problem& problem) { return Layout::total(problem.experts); },
      .function =
          [](const Problem& problem) {
            return with_format(Formats(), problem.dtype, Functions{}).plain;
          },
      .refuse = [](const KernelEntry& self, const Problem& problem,
                   const DeviceFacts& facts) { return refuse(Kernel, self, problem, facts); },
  };
  // Kernels for some of the GPUs only are loaded when they are first launched.
  if constexpr (kTensor16 && Kernel.arch == 80 && Kernel.loads == Loads::kVectors &&
                !Kernel.quantised) {
    entry.layer_functions = layer_functions(Functions{}, Formats());
  }
  return entry;
}

}  // namespace moegemm::cuda::sm80
