#include <algorithm>
#include <cstdint>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch.h"
#include "cuda/backend/loading.h"
#include "cuda/backend/segment_params.h"
#include "cuda/passes/activation/backward_kernels.cuh"
#include "cuda/passes/activation/kernel_choice.h"
#include "cuda/passes/activation/limits.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/passes.h"

namespace moegemm::cuda {
namespace {

struct PackedKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&backward_packs<T, L>);
  }
};

struct SegmentKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&backward_segments<T, L>);
  }
};

const ListedKernels listed([] { return for_16_bit_layouts(PackedKernel()); });
const ListedKernels listed_segments([] { return for_16_bit_layouts(SegmentKernel()); });

/// Rows can be moved by 16-byte accesses, and counted as start_of does.
bool is_packed(const TensorView& view) {
  return is_16_byte_aligned(view) && view.row_stride <= INT32_MAX;
}
bool packed_if_given(const TensorView& view) { return !view.given() || is_packed(view); }

/// Rows of a block: as many as have kStripsOfBlock, and no more than leave every multiprocessor
/// some.
std::int64_t rows_of_block(std::int64_t rows, std::int64_t strips, std::int64_t resident_blocks) {
  const std::int64_t most =
      std::min<std::int64_t>(kMostRows, (rows + resident_blocks - 1) / resident_blocks);
  return std::clamp<std::int64_t>(kStripsOfBlock / strips, 1, most);
}

/// What a launch reads and writes, and what follows from that alone.
BackwardArguments tensors_of(const ActivationGradientInputs& in, const RoutingView& routing,
                             const Activation& activation, const ActivationGradientOutputs& out) {
  const std::int64_t rows = in.pre.shape[0], activated = in.d_act.shape[1];
  return {
      .pre = floats_of(in.pre),
      .bias = floats_of(in.bias),
      .d_act = floats_of(in.d_act),
      .d_out = floats_of(in.d_out),
      .down_bias = floats_of(in.down_bias),
      .d_pre = floats_of(out.d_pre),
      .weighted_act = floats_of(out.weighted_act),
      .d_weights = floats_of(out.d_weights),
      .weights = floats_of(routing.router_weights),
      .gather_indices = indices_of(routing.gather_indices),
      .segments = segment_params(routing, rows, rows),
      .rows = static_cast<int>(rows),
      .flat_rows = 0,
      .topk = static_cast<int>(routing.topk),
      .activated = static_cast<int>(activated),
      .hidden = 0,
      .hidden_strips = 0,
      .group_rows = 0,
      .strips = 0,
      .activation = activation,
      .columns = gate_columns(activation, activated),
  };
}

}  // namespace

void CudaPasses::activate_backward(const ActivationGradientInputs& in, const RoutingView& routing,
                                   const Activation& activation,
                                   const ActivationGradientOutputs& out,
                                   const ExecutionContext& context) const {
  const PassLaunch on(in.pre.device, context);
  const std::int64_t rows = in.pre.shape[0], activated = in.d_act.shape[1];
  const std::int64_t flat_rows = flat_rows_of(routing, out, rows);
  const auto clear_d_weights = [&] {
    if (!out.d_weights.given()) return;
    // All zero bits are zero in every floating dtype.
    cuda::check(
        cudaMemsetAsync(out.d_weights.data, 0,
                        static_cast<std::size_t>(flat_rows * size_bytes(out.d_weights.dtype)),
                        on.stream),
        "clear d_weights for activate_backward");
  };
  if (rows == 0) return clear_d_weights();
  const std::int64_t experts = routing.m_sizes.shape[0];
  const std::int64_t hidden = in.d_out.given() ? in.d_out.shape[1] : 0;
  const std::int64_t strips = (activated + kStripColumns - 1) / kStripColumns;
  const bool packed = activated % kPackElems == 0 && in.d_act.dtype == in.pre.dtype &&
                      is_packed(in.pre) && is_packed(in.d_act) && packed_if_given(in.bias) &&
                      is_packed(out.d_pre) && packed_if_given(out.weighted_act) && strips > 0 &&
                      strips <= kMostStrips;
  const DeviceFacts* facts = device_facts(in.pre.device.index);
  const std::int64_t resident = kBlocksPerMultiprocessor * facts->multiprocessors;
  const std::int64_t planned = std::max<std::int64_t>(planned_rows(routing, rows), 1);
  const std::int64_t group = packed ? rows_of_block(planned, strips, resident) : 1;
  const std::int64_t all_hidden_strips = (hidden + kStripColumns - 1) / kStripColumns;
  const bool packed_hidden = packed && hidden % kPackElems == 0 && packed_if_given(in.d_out) &&
                             packed_if_given(in.down_bias) && all_hidden_strips <= kMostStrips;
  const std::int64_t hidden_strips = packed_hidden ? all_hidden_strips : 0;
  const std::int64_t dots = strips + hidden_strips;
  const int shared_bytes =
      packed ? ring_bytes(kStages, size_bytes(in.pre.dtype), activation.gated() ? 3 : 2, kThreads) +
                   static_cast<int>(group *
                                    static_cast<std::int64_t>(sizeof(Row) + dots * sizeof(float)))
             : 0;
  require_activation_limits(std::max(rows, flat_rows), std::max(in.pre.shape[1], hidden), experts,
                            shared_bytes, in.pre.device);
  BackwardArguments arguments = tensors_of(in, routing, activation, out);
  arguments.flat_rows = static_cast<int>(flat_rows);
  arguments.hidden = static_cast<int>(hidden);
  arguments.hidden_strips = static_cast<int>(hidden_strips);
  arguments.group_rows = static_cast<int>(group);
  arguments.strips = static_cast<int>(strips);
  clear_d_weights();
  void* parameters[] = {&arguments};
  const auto blocks_for = [&](std::int64_t count) {
    return dim3(static_cast<unsigned>((count + group - 1) / group));
  };
  if (packed && is_packed_with_zeros(routing)) {
    launch({for_dtype_and_layout(in.pre.dtype, activation.layout, PackedKernel()),
            "activate_backward (packs)", blocks_for(rows), dim3(kThreads),
            shared_bytes + row_prefix_bytes(experts)},
           parameters, on.stream);
    return;
  }
  if (routing.tails == Tails::kZero) {
    zero_gaps(out.d_pre, routing, context);
    if (out.weighted_act.given()) zero_gaps(out.weighted_act, routing, context);
  }
  if (!packed) {
    const std::int64_t blocks = std::min((planned + kWarps - 1) / kWarps, resident);
    launch({reinterpret_cast<const void*>(&backward_elements), "activate_backward (elements)",
            dim3(static_cast<unsigned>(blocks)), dim3(kThreads), row_prefix_bytes(experts)},
           parameters, on.stream);
    return;
  }
  launch({for_dtype_and_layout(in.pre.dtype, activation.layout, SegmentKernel()),
          "activate_backward (segments)", blocks_for(planned), dim3(kThreads),
          shared_bytes + row_prefix_bytes(experts) + static_cast<int>(group * sizeof(int))},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
