#include "core/validation/validate.h"

#include <algorithm>

#include "core/refusal.h"
#include "core/types/names.h"
#include "core/validation/quantization_rules.h"
#include "core/validation/tensor_rules.h"

namespace moegemm {
namespace {

void require_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse_value(name, " is ", value, "; it must be at least ", least);
}

/// No operand takes more bytes than 64 bits count, with 8 for an element, the most that any has.
void require_countable_bytes(const Problem& problem) {
  const std::int64_t weights =
      checked_product(checked_product(problem.experts, problem.n, "E * N"), problem.k, "E * N * K");
  checked_product(weights, 8, "bytes of E * N * K");
  const std::int64_t values = checked_product(std::max(problem.rows, problem.slots),
                                              std::max(problem.n, problem.k), "M * max(N, K)");
  checked_product(values, 8, "bytes of M * max(N, K)");
}

}  // namespace

void require_accumulable(const DTypeArgument& out, const CallerWords& words) {
  if (out.dtype != DType::kFloat32) {
    refuse_type(out.name, out.verb, to_string(out.dtype), "; accumulate=", words.yes,
                " needs fp32");
  }
}

void validate_flags(const Problem& problem, const CallerWords& words) {
  require_topk(problem.topk);
  const auto refuse_flag = [&](const char* flag, const char* rule) {
    refuse_value(flag, "=", words.yes, " for ", to_string(problem.op), " with ",
                 to_string(problem.permutation), "; ", rule);
  };
  if (problem.multiply && problem.permutation != Permutation::kY) {
    refuse_value(words.multiply, "=", words.yes, " with permute_y=", words.no,
                 "; it needs permute_y=", words.yes);
  }
  if (problem.multiply && problem.weight_layout != WeightLayout::kNk) {
    refuse_value(words.multiply, "=", words.yes, " with W as [E, K, N]; only [E, N, K] multiplies");
  }
  if (problem.multiply && problem.segments != Segments::kPacked) {
    refuse_value(words.multiply, "=", words.yes, " with ",
                 problem.segments == Segments::kPlaced ? "starts" : "ends",
                 "; router weights in flat order need segments that follow one another");
  }
  if (problem.accumulate && problem.op != Op::kDw) refuse_flag("accumulate", "only dW accumulates");
  if (problem.dy_per_token && !problem.gathers_dy()) {
    refuse_flag("dy_per_token", "only dX and dW with permute_y gather dy");
  }
  if (problem.presorted && (problem.op != Op::kDw || problem.permutation == Permutation::kNone)) {
    refuse_flag("presorted", "only dW has an operand to copy into order");
  }
  if (problem.rows_pending && problem.op == Op::kDw) {
    refuse_flag("rows_pending", "only forward and dX begin with their weights");
  }
  if (problem.bias && problem.op == Op::kDw) {
    refuse_value("bias is given for dW; only forward and dX add one");
  }
  if (problem.low_rank != 0 && problem.op == Op::kDw) {
    refuse_value("a low-rank part is given for dW; only forward and dX add one");
  }
  if (!problem.quantization.plain()) validate_quantized_op(problem, words);
  if (problem.ups_apart && (problem.op != Op::kForward || problem.low_rank != 0 ||
                            problem.weight_layout != WeightLayout::kNk ||
                            !problem.quantization.plain() || problem.multiply)) {
    refuse_value(words.w_up, " is given; only a plain forward with W as [E, N, K] has two halves");
  }
  if (!problem.activation) return;
  if (problem.ups_apart) require_halves(words.w_up, *problem.activation);
  if (problem.multiply) {
    refuse_value("activation is given with ", words.multiply,
                 "; a row is weighted after the second product");
  }
  if (problem.op == Op::kDw || problem.scatters()) {
    refuse_value("activation is given for ", to_string(problem.op), " with ",
                 to_string(problem.permutation),
                 "; only forward and dX in expert order are activated");
  }
}

void validate(const Problem& problem, const CallerWords& words) {
  validate_flags(problem, words);
  require_at_least("E", problem.experts, 1);
  require_at_least("N", problem.n, 1);
  require_at_least("K", problem.k, 1);
  require_at_least("M", problem.rows, 0);
  require_expected_rows(problem.expected_rows);
  require_at_least("max_multiprocessors", problem.max_multiprocessors, 0);
  require_at_least("low_rank", problem.low_rank, 0);
  if (problem.slots >= 0 &&
      (problem.permutation == Permutation::kNone || problem.slots % problem.topk != 0)) {
    refuse_value("slots is ", problem.slots, " with ", to_string(problem.permutation),
                 "; it must be a multiple of topk = ", problem.topk, ", and -1 without indices");
  }
  if (problem.activation) {
    require_activation(*problem.activation, "the product", problem.features());
  }
  const DTypeArgument own{"the problem", problem.dtype}, out_dtype{"out_dtype", problem.out_dtype};
  require_floating({"dtype", problem.dtype});
  require_dtype_or_float32(out_dtype, own);
  if (problem.accumulate) require_accumulable(out_dtype, words);
  require_index({"sizes_dtype", problem.sizes_dtype});
  require_index({"index_dtype", problem.index_dtype});
  require_dtype_or_float32({"weights_dtype", problem.weights_dtype}, own);
  require_countable_bytes(problem);
  if (!problem.quantization.plain()) {
    require_blocks(problem.quantization, words.w, words.w_scales, problem.n, problem.k);
  }
}

void validate(const KernelConfig& config, const Problem& problem, const CallerWords& words) {
  require_at_least("block_rows", config.block_rows, 0);
  require_at_least("block_columns", config.block_columns, 0);
  require_at_least("block_depth", config.block_depth, 0);
  require_at_least("stages", config.stages, 0);
  const auto refuse_tma = [&](const char* flag, const char* what) {
    refuse_value(flag, "=", words.yes, " with ", to_string(problem.permutation), "=", words.yes,
                 " for ", to_string(problem.op), "; TMA copies whole boxes and cannot ", what);
  };
  const bool rows_gathered = problem.op == Op::kDx ? problem.gathers_dy() : problem.gathers_x();
  if (config.tma_load_rows.value_or(false) && rows_gathered) {
    refuse_tma(words.tma_load_rows, "load a gathered operand");
  }
  if (config.tma_load_weights.value_or(false) && problem.op == Op::kDw && problem.gathers_dy()) {
    refuse_tma(words.tma_load_weights, "load a gathered operand");
  }
  if (config.tma_store.value_or(false) && problem.scatters()) {
    refuse_tma(words.tma_store, "store scattered rows");
  }
}

void check_config(const KernelConfig& config, Op op, Permutation permutation,
                  const CallerWords& words) {
  Problem problem;
  problem.op = op;
  problem.permutation = permutation;
  validate(config, problem, words);
}

}  // namespace moegemm
