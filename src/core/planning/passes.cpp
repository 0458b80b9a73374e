#include "core/planning/passes.h"

#include <algorithm>

namespace moegemm {
namespace {

/// Of dense rows in a workspace: its base is aligned, their pitch may not be.
int dense_alignment(std::int64_t columns, DType dtype) {
  int alignment = 16;
  while (columns * size_bytes(dtype) % alignment != 0) alignment /= 2;
  return alignment;
}

}  // namespace

Problem product_beside(StepKind pass, const Problem& problem) {
  Problem product = problem;
  switch (pass) {
    case StepKind::kProduct:
      break;
    case StepKind::kScaleX:
      product.multiply = false;
      product.input_alignment =
          std::min(problem.dy_alignment, dense_alignment(problem.k, problem.dtype));
      break;
    case StepKind::kDequantise:
      product.quantization = {};
      product.packed_alignment = product.scales_alignment = 16;
      product.input_alignment =
          std::min(problem.input_alignment, dense_alignment(problem.k, problem.dtype));
      break;
    case StepKind::kGatherX:
    case StepKind::kGatherDy:
      product.presorted = true;
      product.far_rows = false;
      product.dy_per_token = false;
      break;
    case StepKind::kZeroGaps:
      product.tails = Tails::kUndefined;
      break;
    case StepKind::kActivate:
      // The pass adds the bias: what a layer that keeps the product for its backward does too.
      product.bias = false;
      product.activation.reset();
      product.out_dtype = problem.dtype;
      product.output_alignment = dense_alignment(problem.features(), problem.dtype);
      break;
  }
  return product;
}

Problem product_of(const Plan& plan, const Problem& problem) {
  Problem product = problem;
  for (const Step& step : plan.steps) product = product_beside(step.kind, product);
  return product;
}

std::int64_t workspace_columns(StepKind pass, const Problem& problem) {
  switch (pass) {
    case StepKind::kProduct:
    case StepKind::kZeroGaps:
      break;
    case StepKind::kDequantise:
    case StepKind::kScaleX:
    case StepKind::kGatherX:
      return problem.k;
    case StepKind::kGatherDy:
      return problem.n;
    case StepKind::kActivate:
      return problem.features();
  }
  return 0;
}

std::int64_t row_bytes(StepKind pass, const Problem& problem) {
  const std::int64_t rows =
      pass == StepKind::kDequantise ? problem.experts * problem.n : problem.rows;
  return workspace_part(rows * workspace_columns(pass, problem) * size_bytes(problem.dtype));
}

std::int64_t workspace_bytes(StepKind pass, const Problem& problem) {
  const std::int64_t dots = pass == StepKind::kScaleX
                                ? workspace_part(problem.flat_rows() * size_bytes(DType::kFloat32))
                                : 0;
  return row_bytes(pass, problem) + dots;
}

}  // namespace moegemm
