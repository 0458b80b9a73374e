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

/// Columns whose rows are multiples of 16 bytes.
std::int64_t padded(std::int64_t columns, DType dtype) {
  const std::int64_t chunk = 16 / size_bytes(dtype);
  return (columns + chunk - 1) / chunk * chunk;
}

}  // namespace

bool is_aligned(const Problem& problem) {
  return problem.input_alignment >= 16 && problem.n == padded(problem.n, problem.dtype) &&
         problem.k == padded(problem.k, problem.dtype) && !needs_trimming(problem);
}

bool needs_trimming(const Problem& problem) {
  const bool gradient = problem.op == Op::kDw;
  const bool pads_rows = gradient && problem.n != padded(problem.n, problem.dtype);
  const std::int64_t columns = gradient ? problem.k : problem.features();
  return problem.output_alignment < 16 || pads_rows || columns != padded(columns, problem.dtype);
}

bool can_align(const Problem& problem) {
  // Copies are of all rows, whatever their segments, and of nothing but the two inputs.
  const bool all_rows = problem.segments == Segments::kPacked && problem.tails == Tails::kZero &&
                        problem.planned_rows() == problem.rows;
  const bool bare = problem.quantization.plain() && problem.low_rank == 0 && !problem.presorted &&
                    !problem.ups_apart && !(problem.op == Op::kDw && problem.multiply);
  // A bias is read as far as the product is wide, and trimming adds nothing up.
  const bool trims = !problem.bias && !problem.activation && !problem.accumulate;
  return all_rows && bare && (trims || !needs_trimming(problem));
}

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
    case StepKind::kAlignX:  // both inputs are copied, or none
    case StepKind::kAlignDy:
    case StepKind::kAlignW:
      product.n = padded(problem.n, problem.dtype);
      product.k = padded(problem.k, problem.dtype);
      product.input_alignment = product.dy_alignment = 16;
      product.far_rows = product.far_apart = false;
      break;
    case StepKind::kTrim:
      product.output_alignment = 16;
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

Problem half_of(const Problem& problem) {
  Problem half = problem;
  half.ups_apart = half.ups_follow = false;
  half.n /= 2;
  half.output_alignment =
      std::min(problem.output_alignment, dense_alignment(half.n, problem.out_dtype));
  return half;
}

std::int64_t features_at_a_time(const Problem& problem) {
  const std::int64_t all = problem.features();
  const std::int64_t feature_bytes = problem.experts *
                                     (problem.op == Op::kForward ? problem.k : problem.n) *
                                     size_bytes(problem.dtype);
  if (problem.quantization.plain() || problem.low_rank > 0 || problem.ups_apart ||
      all * feature_bytes <= kMostDecodedBytes) {
    return all;
  }
  constexpr std::int64_t kChunk = 64;  // features of every tile, and 16 bytes of every dtype
  const std::int64_t chunks = all / kChunk;
  if (all % kChunk != 0) return all;
  for (std::int64_t cuts = 2; cuts <= chunks; ++cuts) {
    if (chunks % cuts == 0 && all / cuts * feature_bytes <= kMostDecodedBytes) return all / cuts;
  }
  return chunks > 1 ? kChunk : all;
}

Problem cut_of(const Problem& problem, std::int64_t features) {
  Problem cut = problem;
  (problem.op == Op::kForward ? cut.n : cut.k) = features;
  return cut;
}

Problem product_of(const Plan& plan, const Problem& problem) {
  Problem product = problem;
  for (const Step& step : plan.steps) {
    product = product_beside(step.kind, product);
    if (step.columns == Columns::kFirstHalf) product = half_of(product);
  }
  return product;
}

std::int64_t workspace_columns(StepKind pass, const Problem& problem) {
  switch (pass) {
    case StepKind::kProduct:
    case StepKind::kZeroGaps:
      break;
    case StepKind::kDequantise:
      return problem.op == Op::kForward ? problem.k : features_at_a_time(problem);
    case StepKind::kScaleX:
    case StepKind::kGatherX:
      return problem.k;
    case StepKind::kGatherDy:
      return problem.n;
    case StepKind::kAlignX:
    case StepKind::kAlignW:
      return padded(problem.k, problem.dtype);
    case StepKind::kAlignDy:
      return padded(problem.n, problem.dtype);
    case StepKind::kTrim:
      return padded(problem.op == Op::kDw ? problem.k : problem.features(), problem.dtype);
    case StepKind::kActivate:
      return problem.features();
  }
  return 0;
}

std::int64_t workspace_rows(StepKind pass, const Problem& problem) {
  switch (pass) {
    case StepKind::kDequantise:  // of the part that is decoded at a time
      return problem.experts *
             (problem.op == Op::kForward ? features_at_a_time(problem) : problem.n);
    case StepKind::kAlignW:
      return problem.experts * padded(problem.n, problem.dtype);
    case StepKind::kAlignX:
      return problem.gathers_x() ? problem.tokens() : problem.rows;
    case StepKind::kAlignDy:
      return problem.gathers_dy() ? problem.flat_rows() / problem.gather_divisor() : problem.rows;
    case StepKind::kTrim:
      return problem.op == Op::kDw ? problem.experts * padded(problem.n, problem.dtype)
                                   : problem.output_rows();
    default:
      return problem.rows;
  }
}

std::int64_t row_bytes(StepKind pass, const Problem& problem) {
  return workspace_part(workspace_rows(pass, problem) * workspace_columns(pass, problem) *
                        size_bytes(pass == StepKind::kTrim ? problem.out_dtype : problem.dtype));
}

std::int64_t workspace_bytes(StepKind pass, const Problem& problem) {
  const std::int64_t dots = pass == StepKind::kScaleX
                                ? workspace_part(problem.flat_rows() * size_bytes(DType::kFloat32))
                                : 0;
  return row_bytes(pass, problem) + dots;
}

}  // namespace moegemm
