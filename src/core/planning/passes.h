#pragma once

#include <cstdint>

#include "moegemm/plan.h"
#include "moegemm/problem.h"

/// What a pass leaves of a problem for the product. Lowering and running both go by these, so that
/// a product is launched with the very problem that it was planned for.
namespace moegemm {

/// Parts of a workspace start at multiples of this many bytes.
constexpr std::int64_t kWorkspaceAlignment = 256;

constexpr std::int64_t workspace_part(std::int64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

/// The problem of the product beside a pass of this kind.
Problem product_beside(StepKind pass, const Problem& problem);

/// The product of one half of N, where they are in two tensors.
Problem half_of(const Problem& problem);

/// Bytes that decoded weights may take in a workspace, where they can be cut: W is decoded and
/// multiplied by some features (N of forward, K of dX) at a time, each with all of its contraction,
/// so that bits do not change. 1 GiB is little on any GPU that such layers run on, and hundreds of
/// features of the largest.
constexpr std::int64_t kMostDecodedBytes = std::int64_t{1} << 30;

/// The features of such a cut: all if they are within the bound or cannot be cut, else the most
/// within it of which there is a whole number of cuts. Weights with a low-rank part beside them are
/// not cut, and neither are features that are no multiple of 64.
std::int64_t features_at_a_time(const Problem& problem);

/// The product of so many features.
Problem cut_of(const Problem& problem, std::int64_t features);

/// The problem of the plan's product, of all its cuts, where `problem` is what was planned.
Problem product_of(const Plan& plan, const Problem& problem);

/// The pass that copies the gathered operand of dW into order.
inline StepKind gathering_pass(const Problem& problem) {
  return problem.gathers_x() ? StepKind::kGatherX : StepKind::kGatherDy;
}

/// Whether the extents, the inputs and the output have rows of whole 16 bytes that begin at
/// multiples of 16.
bool is_aligned(const Problem& problem);

/// Whether the product of padded inputs is wider or higher than the output, which kTrim then fills.
bool needs_trimming(const Problem& problem);

/// Whether passes can align the inputs of a problem, and trim its output.
bool can_align(const Problem& problem);

/// Rows and columns in the workspace that a pass writes, or reads where it comes after the product.
std::int64_t workspace_rows(StepKind pass, const Problem& problem);
std::int64_t workspace_columns(StepKind pass, const Problem& problem);

/// Bytes of those rows, which are W's in the case of kDequantise; the dot products that scaling
/// makes along the way come after them.
std::int64_t row_bytes(StepKind pass, const Problem& problem);

/// All of the workspace that a pass takes.
std::int64_t workspace_bytes(StepKind pass, const Problem& problem);

}  // namespace moegemm
