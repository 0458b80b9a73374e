#include "core/tuning/measure/operand_rotation.h"

#include <algorithm>

#include "core/tuning/measure/device_copy.h"

namespace moegemm {
namespace {

constexpr std::int64_t kAlignment = 256;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// One operand of a call.
struct Part {
  std::int64_t span = 0;     ///< bytes from its first to its last element
  std::int64_t touched = 0;  ///< bytes of them that a launch reads or writes
};

Part matrix(std::int64_t rows, std::int64_t columns, std::int64_t stride, DType dtype) {
  if (rows == 0) return {};
  return {((rows - 1) * stride + columns) * size_bytes(dtype), rows * columns * size_bytes(dtype)};
}

Part bytes(std::int64_t count) { return {count, count}; }

struct Input {
  const void* Operands::*place;
  Part part;
};

Part output_of(const Call& call) {
  const Problem& p = call.problem;
  if (p.op == Op::kDw) {
    return matrix(p.experts * p.n, p.k, call.operands.out_stride, p.out_dtype);
  }
  return matrix(p.output_rows(), p.output_columns(), call.operands.out_stride, p.out_dtype);
}

std::vector<Input> inputs_of(const Call& call, std::int64_t experts_in_use) {
  const Problem& p = call.problem;
  const Operands& o = call.operands;
  std::vector<Input> inputs;
  const auto add = [&](const void* Operands::*place, const Part& part) {
    if (o.*place != nullptr && part.span > 0) inputs.push_back({place, part});
  };
  add(&Operands::x, matrix(p.gathers_x() ? p.tokens() : p.rows, p.k, o.x_stride, p.dtype));
  const Quantization& q = p.quantization;
  Part weights = q.plain() ? matrix(p.experts * p.n, p.k, o.w_stride, p.dtype)
                           : bytes(p.experts * q.expert_bytes(p.n, p.k));
  weights.touched = weights.touched / p.experts * experts_in_use;
  add(&Operands::w, weights);
  add(&Operands::w_scales,
      bytes(p.experts * q.expert_scales(p.n, p.k) * scale_bytes(q.scale_type)));
  add(&Operands::dy, matrix(p.dy_per_token ? p.tokens() : p.rows, p.n, o.dy_stride, p.dtype));
  add(&Operands::bias, matrix(p.experts, p.features(), o.bias_stride, p.dtype));
  add(&Operands::low_rows, matrix(p.rows, p.low_rank, o.low_rows_stride, p.dtype));
  const Problem part = low_rank_part(p);
  add(&Operands::low_weights, matrix(part.experts * part.n, part.k, o.low_weights_stride, p.dtype));
  add(&Operands::m_sizes, matrix(1, p.experts, p.experts, p.sizes_dtype));
  add(&Operands::gather_indices, matrix(1, p.rows, p.rows, p.index_dtype));
  add(&Operands::router_weights, matrix(1, p.flat_rows(), p.flat_rows(), p.weights_dtype));
  return inputs;
}

template <typename T>
std::int64_t count_in_use(const Call& call, const ExecutionContext& context) {
  std::vector<T> sizes(static_cast<std::size_t>(call.problem.experts));
  copy_to_host(call.problem.device, context, sizes.data(), call.operands.m_sizes,
               call.problem.experts * static_cast<std::int64_t>(sizeof(T)));
  return std::count_if(sizes.begin(), sizes.end(), [](T size) { return size > 0; });
}

std::int64_t experts_in_use(const Call& call, const ExecutionContext& context) {
  return call.problem.sizes_dtype == DType::kInt64 ? count_in_use<std::int64_t>(call, context)
                                                   : count_in_use<std::int32_t>(call, context);
}

}  // namespace

std::optional<OperandRotation> OperandRotation::borrow(const Call& call,
                                                       std::int64_t workspace_bytes,
                                                       const CacheSizes& caches,
                                                       const ExecutionContext& context,
                                                       TuningSupport& support) {
  const Device device = call.problem.device;
  OperandRotation rotation;
  const auto lend = [&](std::int64_t bytes) {
    void* memory = support.allocate(bytes, device);
    if (memory != nullptr) rotation.memory_bytes_ += bytes;
    return static_cast<std::byte*>(memory);
  };

  const Part output = output_of(call);
  const std::vector<Input> inputs = inputs_of(call, experts_in_use(call, context));
  Operands first = call.operands;
  first.out = lend(output.span);
  if (first.out == nullptr) return std::nullopt;
  if (workspace_bytes > 0) rotation.workspace_ = lend(workspace_bytes);
  if (workspace_bytes > 0 && rotation.workspace_ == nullptr) return std::nullopt;
  rotation.sets_.push_back(first);

  std::int64_t set_bytes = aligned(output.span);
  std::int64_t touched = output.touched;
  for (const Input& input : inputs) {
    set_bytes += aligned(input.part.span);
    touched += input.part.touched;
  }
  const std::int64_t copies = (caches.rotate_bytes - 1) / std::max<std::int64_t>(touched, 1);
  if (copies <= 0) return rotation;

  std::byte* memory = nullptr;
  if (copies * set_bytes <= kMostCopied * caches.rotate_bytes) memory = lend(copies * set_bytes);
  if (memory == nullptr) {
    rotation.flush_ = lend(caches.flush_bytes);
    if (rotation.flush_ == nullptr) return std::nullopt;
    return rotation;
  }
  for (std::int64_t i = 0; i < copies; ++i) {
    std::byte* place = memory + i * set_bytes;
    Operands set = first;
    set.out = place;
    place += aligned(output.span);
    for (const Input& input : inputs) {
      if (i == 0) {
        copy_on_device(device, context, place, call.operands.*input.place, input.part.span);
      }
      set.*input.place = place;
      place += aligned(input.part.span);
    }
    rotation.sets_.push_back(set);
  }
  // The first copy makes the second, both make the next two, and so on.
  for (std::int64_t done = 1; done < copies; done *= 2) {
    copy_on_device(device, context, memory + done * set_bytes, memory,
                   std::min(done, copies - done) * set_bytes);
  }
  return rotation;
}

const Operands& OperandRotation::next() {
  const Operands& set = sets_[next_];
  next_ = (next_ + 1) % sets_.size();
  return set;
}

}  // namespace moegemm
