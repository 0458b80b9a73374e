#include "core/run.h"

#include "core/planning/passes.h"
#include "core/registry.h"

namespace moegemm {
namespace {

/// A call on its way through the steps: each pass changes what is left for the product.
class Walk {
 public:
  Walk(const Call& call, std::byte* workspace, const ExecutionContext& context)
      : asked_(call),
        problem_(call.problem),
        operands_(call.operands),
        workspace_(workspace),
        context_(context) {}

  void run(const Planned& planned, const Step& step) {
    switch (step.kind) {
      case StepKind::kProduct:
        multiply(*planned.backend, step);
        return;
      case StepKind::kScaleX:
        scale(step);
        break;
      case StepKind::kDequantise:
        dequantise(step);
        break;
      case StepKind::kGatherX:
      case StepKind::kGatherDy:
        gather(step);
        break;
      case StepKind::kAlignX:
        align(step, operands_.x, operands_.x_stride);
        break;
      case StepKind::kAlignDy:
        align(step, operands_.dy, operands_.dy_stride);
        break;
      case StepKind::kAlignW:
        align(step, operands_.w, operands_.w_stride);
        break;
      case StepKind::kTrim:
        trim();
        return;
      case StepKind::kZeroGaps:
        passes_for(problem_.device)
            .zero_gaps(output(), problem_.scatters() ? RoutingView{} : routing(), context_);
        break;
      case StepKind::kActivate:
        activate();
        return;
    }
    problem_ = product_beside(step.kind, problem_);
  }

 private:
  TensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                    std::int64_t stride) const {
    return TensorView::matrix(data, dtype, rows, columns, stride, problem_.device);
  }
  TensorView stack(const void* data, DType dtype, std::int64_t count, std::int64_t rows,
                   std::int64_t columns, std::int64_t stride) const {
    return TensorView::stack(data, dtype, count, rows, columns, stride, problem_.device);
  }
  /// What a pass wrote, or reads, at `offset` of the workspace: dense rows of the inputs' dtype.
  TensorView rows_in_workspace(StepKind pass, std::int64_t offset) const {
    const std::int64_t columns = workspace_columns(pass, asked_.problem);
    return matrix(place(offset), problem_.dtype, problem_.rows, columns, columns);
  }
  /// A plan for no rows has no workspace.
  std::byte* place(std::int64_t offset) const {
    return workspace_ == nullptr ? nullptr : workspace_ + offset;
  }
  TensorView vector(const void* data, DType dtype, std::int64_t length) const {
    return TensorView::vector(data, dtype, length, problem_.device);
  }
  RoutingView routing() const { return segments_view(problem_, operands_); }
  TensorView gather_indices() const {
    return vector(operands_.gather_indices, problem_.index_dtype, problem_.rows);
  }

  void multiply(const Backend& backend, const Step& step) {
    if (step.workspace_offset >= 0 && !asked_.problem.activation) {
      product_ = padded_output(place(step.workspace_offset));
      operands_.out = product_.data;
      operands_.out_stride = product_.row_stride;
      problem_ = product_beside(StepKind::kTrim, problem_);
    } else if (step.workspace_offset >= 0) {
      const TensorView rows = rows_in_workspace(StepKind::kActivate, step.workspace_offset);
      product_ = rows;
      operands_.out = rows.data;
      operands_.out_stride = rows.row_stride;
      operands_.bias = nullptr;
      problem_ = product_beside(StepKind::kActivate, problem_);
    }
    if (step.features > 0) {
      const Operands cut = operands_from(operands_, step.first_feature);
      backend.launch(step, cut_of(problem_, step.features), cut, context_);
    } else if (step.columns == Columns::kAll) {
      backend.launch(step, problem_, operands_, context_);
    } else {
      backend.launch(step, half_of(problem_), operands_of(step.columns), context_);
    }
  }

  Operands operands_of(Columns columns) const {
    Operands half = operands_;
    half.w_up = nullptr;
    if (columns == Columns::kFirstHalf) return half;
    half.w = operands_.w_up;
    return operands_from(half, asked_.problem.n / 2);
  }

  /// Output and bias from that feature on.
  Operands operands_from(Operands operands, std::int64_t first) const {
    operands.out = static_cast<std::byte*>(operands.out) + first * size_bytes(problem_.out_dtype);
    if (operands.bias != nullptr) {
      operands.bias =
          static_cast<const std::byte*>(operands.bias) + first * size_bytes(problem_.dtype);
    }
    return operands;
  }

  void scale(const Step& step) {
    const TensorView x =
        matrix(operands_.x, problem_.dtype, problem_.rows, problem_.k, operands_.x_stride);
    const TensorView scaled = rows_in_workspace(step.kind, step.workspace_offset);
    const TensorView dots = vector(place(step.workspace_offset + row_bytes(step.kind, problem_)),
                                   DType::kFloat32, problem_.flat_rows());
    RoutingView weighted = routing();
    weighted.gather_indices = gather_indices();
    weighted.router_weights =
        vector(operands_.router_weights, problem_.weights_dtype, problem_.flat_rows());
    passes_for(problem_.device).scale_rows(x, x, weighted, scaled, dots, {}, context_);
    operands_.x = scaled.data;
    operands_.x_stride = scaled.row_stride;
    operands_.router_weights = nullptr;
  }

  void dequantise(const Step& step) {
    const Problem& asked = asked_.problem;
    const auto weights = [](const void* data, const Problem& of) {
      return TensorView::stack(data, of.dtype, of.experts, of.n, of.k, 0, of.device);
    };
    const Problem cut = step.features > 0 ? cut_of(asked, step.features) : asked;
    const TensorView decoded = weights(place(step.workspace_offset), cut);
    const bool by_rows = asked.op == Op::kForward;
    passes_for(asked.device)
        .dequantise(weights(asked_.operands.w, asked), asked_.operands.w_scales, asked.quantization,
                    by_rows ? step.first_feature : 0, by_rows ? 0 : step.first_feature, decoded,
                    context_);
    operands_.w = decoded.data;
    operands_.w_stride = decoded.row_stride;
    operands_.w_scales = nullptr;
  }

  /// Copies an input into padded rows. W is a matrix for each expert, rows are one of all.
  void align(const Step& step, const void*& source, std::int64_t& stride) {
    const Problem& asked = asked_.problem;
    const bool is_w = step.kind == StepKind::kAlignW;
    const std::int64_t count = is_w ? asked.experts : 1;
    const std::int64_t rows = workspace_rows(step.kind, asked) / count;
    const std::int64_t columns = step.kind == StepKind::kAlignDy ? asked.n : asked.k;
    const TensorView padded =
        stack(place(step.workspace_offset), asked.dtype, count, rows,
              workspace_columns(step.kind, asked), workspace_columns(step.kind, asked));
    passes_for(asked.device)
        .resize_rows(stack(source, asked.dtype, count, is_w ? asked.n : rows, columns, stride),
                     padded, context_);
    source = padded.data;
    stride = padded.row_stride;
  }

  /// The product of aligned inputs.
  TensorView padded_output(const void* data) const {
    const Problem& asked = asked_.problem;
    const std::int64_t count = asked.op == Op::kDw ? asked.experts : 1;
    const std::int64_t columns = workspace_columns(StepKind::kTrim, asked);
    return stack(data, asked.out_dtype, count, workspace_rows(StepKind::kTrim, asked) / count,
                 columns, columns);
  }

  void trim() {
    const Problem& asked = asked_.problem;
    const bool gradient = asked.op == Op::kDw;
    passes_for(asked.device)
        .resize_rows(product_,
                     stack(asked_.operands.out, asked.out_dtype, gradient ? asked.experts : 1,
                           gradient ? asked.n : asked.output_rows(),
                           gradient ? asked.k : asked.features(), asked_.operands.out_stride),
                     context_);
  }

  void gather(const Step& step) {
    const bool is_x = step.kind == StepKind::kGatherX;
    const void*& source = is_x ? operands_.x : operands_.dy;
    std::int64_t& stride = is_x ? operands_.x_stride : operands_.dy_stride;
    const std::int64_t divisor = problem_.gather_divisor();
    const TensorView gathered = rows_in_workspace(step.kind, step.workspace_offset);
    passes_for(problem_.device)
        .gather_rows(matrix(source, problem_.dtype, problem_.flat_rows() / divisor,
                            gathered.shape[1], stride),
                     gather_indices(), divisor, gathered, context_);
    source = gathered.data;
    stride = gathered.row_stride;
  }

  TensorView output() const {
    const Problem& asked = asked_.problem;
    return matrix(asked_.operands.out, asked.out_dtype, asked.output_rows(), asked.output_columns(),
                  asked_.operands.out_stride);
  }

  void activate() {
    const Problem& asked = asked_.problem;
    const Operands& operands = asked_.operands;
    const TensorView bias = asked.bias ? matrix(operands.bias, asked.dtype, asked.experts,
                                                asked.features(), operands.bias_stride)
                                       : TensorView{};
    passes_for(asked.device)
        .activate(product_, bias, routing(), *asked.activation, output(), context_);
  }

  const Call& asked_;
  Problem problem_;
  Operands operands_;
  TensorView product_;  ///< in the workspace, for a pass after it
  std::byte* workspace_;
  const ExecutionContext& context_;
};

}  // namespace

RoutingView segments_view(const Problem& problem, const Operands& operands) {
  const auto of_experts = [&](const void* data) {
    return TensorView::vector(data, problem.sizes_dtype, problem.experts, problem.device);
  };
  RoutingView routing{of_experts(operands.m_sizes), {}, {}, problem.topk};
  if (problem.segments == Segments::kPlaced) routing.starts = of_experts(operands.starts);
  routing.ends = problem.segments == Segments::kEnds;
  routing.tails = problem.tails;
  routing.expected_rows = problem.expected_rows;
  return routing;
}

void run_steps(const Planned& planned, const Call& call, std::byte* workspace,
               const ExecutionContext& context) {
  if (planned.plan.steps.size() == 1) {  // spares most calls a copy of what they ask for
    planned.backend->launch(planned.plan.steps[0], call.problem, call.operands, context);
    return;
  }
  Walk walk(call, workspace, context);
  for (const Step& step : planned.plan.steps) walk.run(planned, step);
}

}  // namespace moegemm
