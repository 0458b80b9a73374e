#include "moegemm/problem.h"

#include <bit>

#include "core/refusal.h"
#include "core/types/hashing.h"
#include "core/types/names.h"

namespace moegemm {

namespace {

constexpr Named<Op> kOps[] = {{Op::kForward, "forward"}, {Op::kDx, "dX"}, {Op::kDw, "dW"}};
constexpr Named<Permutation> kPermutations[] = {
    {Permutation::kNone, "none"},
    {Permutation::kX, "permute_x"},
    {Permutation::kY, "permute_y"},
};

}  // namespace

const char* to_string(Op op) { return name_in(kOps, op); }
const char* to_string(Permutation permutation) { return name_in(kPermutations, permutation); }

const char* to_string(WeightLayout layout) {
  return layout == WeightLayout::kNk ? "[E, N, K]" : "[E, K, N]";
}

std::string to_string(const Problem& problem) {
  std::string text = join(to_string(problem.op), " ", to_string(problem.dtype));
  if (problem.out_dtype != problem.dtype) text += join("->", to_string(problem.out_dtype));
  text += join(" E=", problem.experts, " M=", problem.rows, " N=", problem.n, " K=", problem.k,
               " topk=", problem.topk);
  if (problem.slots >= 0) text += join(" slots=", problem.slots);
  if (problem.weight_layout != WeightLayout::kNk) {
    text += join(" W=", to_string(problem.weight_layout));
  }
  if (!problem.quantization.plain()) text += join(" W=", to_string(problem.quantization));
  if (problem.permutation != Permutation::kNone) {
    text += join(" ", to_string(problem.permutation));
    if (problem.index_dtype != DType::kInt32)
      text += join("(", to_string(problem.index_dtype), ")");
  }
  if (problem.segments == Segments::kPlaced) text += " starts";
  if (problem.segments == Segments::kEnds) text += " ends";
  if (problem.tails == Tails::kUndefined) text += " tails=undefined";
  if (problem.expected_rows >= 0) text += join(" expected_rows=", problem.expected_rows);
  if (problem.max_multiprocessors > 0) {
    text += join(" max_multiprocessors=", problem.max_multiprocessors);
  }
  if (problem.multiply) text += join(" multiply(", to_string(problem.weights_dtype), ")");
  if (problem.accumulate) text += " accumulate";
  if (problem.dy_per_token) text += " dy_per_token";
  if (problem.presorted) text += " presorted";
  if (problem.far_rows) text += " far_rows";
  if (problem.far_apart) text += " far_apart";
  if (problem.rows_pending) text += " rows_pending";
  if (problem.allow_tf32) text += " tf32";
  if (!problem.batch_invariant) text += " any_order";
  if (problem.ups_apart) text += problem.ups_follow ? " ups_apart" : " ups_apart(anywhere)";
  if (problem.low_rank > 0) text += join(" low_rank=", problem.low_rank);
  if (problem.bias) text += " bias";
  if (problem.activation) text += join(" activation=", to_string(*problem.activation));
  if (problem.sizes_dtype != DType::kInt32) {
    text += join(" m_sizes(", to_string(problem.sizes_dtype), ")");
  }
  if (problem.input_alignment != 16 || problem.output_alignment != 16) {
    text += join(" align=", problem.input_alignment, "/", problem.output_alignment);
  }
  if (problem.packed_alignment != 16 || problem.scales_alignment != 16) {
    text += join(" W align=", problem.packed_alignment, "/", problem.scales_alignment);
  }
  if (problem.dy_alignment != 16) text += join(" dY align=", problem.dy_alignment);
  return text + " on " + to_string(problem.device);
}

std::size_t hash_value(const Problem& problem) {
  // Everything small in one word: each field has more bits here than values.
  std::uint64_t small = static_cast<std::uint64_t>(problem.op);
  const auto append = [&small](auto value, int bits) {
    small = (small << bits) | static_cast<std::uint64_t>(value);
  };
  append(problem.dtype, 3);
  append(problem.out_dtype, 3);
  append(problem.weight_layout, 1);
  append(problem.permutation, 2);
  append(problem.multiply, 1);
  append(problem.accumulate, 1);
  append(problem.dy_per_token, 1);
  append(problem.allow_tf32, 1);
  append(problem.sizes_dtype, 3);
  append(problem.index_dtype, 3);
  append(problem.weights_dtype, 3);
  append(problem.input_alignment, 5);
  append(problem.output_alignment, 5);
  append(problem.dy_alignment, 5);
  append(problem.device.type, 1);
  append(problem.device.index, 16);
  append(problem.bias, 1);
  append(problem.presorted, 1);
  append(problem.far_rows, 1);
  append(problem.far_apart, 1);
  append(problem.segments, 2);
  append(problem.tails, 1);
  std::size_t hash = fold_hash(0, small);
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.experts));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.n));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.k));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.rows));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.topk));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.slots));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.expected_rows));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.max_multiprocessors) * 4 +
                             (problem.batch_invariant ? 2 : 0) + (problem.rows_pending ? 1 : 0));
  hash = fold_hash(hash, static_cast<std::uint64_t>(problem.low_rank) * 4 +
                             (problem.ups_apart ? 2 : 0) + (problem.ups_follow ? 1 : 0));
  if (const Quantization& q = problem.quantization; !q.plain()) {
    hash = fold_hash(hash, static_cast<std::uint64_t>(q.format) << 24 |
                               static_cast<std::uint64_t>(q.scale_type) << 16 |
                               static_cast<std::uint64_t>(problem.packed_alignment) << 8 |
                               static_cast<std::uint64_t>(problem.scales_alignment));
    hash = fold_hash(hash, static_cast<std::uint64_t>(q.block_n));
    hash = fold_hash(hash, static_cast<std::uint64_t>(q.block_k));
  }
  if (!problem.activation) return hash;
  const Activation& activation = *problem.activation;
  hash = fold_hash(hash, static_cast<std::uint64_t>(activation.function) * 4 +
                             static_cast<std::uint64_t>(activation.layout) + 1);
  for (const float number : {activation.alpha, activation.limit, activation.up_offset}) {
    hash = fold_hash(hash, std::bit_cast<std::uint32_t>(number));
  }
  return hash;
}

}  // namespace moegemm
