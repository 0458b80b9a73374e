#include "conformance/cases/random_case.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

/// Sizes that kernels care about come up often, the rest now and then.
std::int64_t random_extent(Random& random, std::int64_t limit) {
  switch (random.below(4)) {
    case 0:
      return random.between(1, std::min<std::int64_t>(limit, 40));
    case 1:
      return random.between(1, limit);
    default:
      return 8 * random.between(1, std::max<std::int64_t>(1, limit / 8));
  }
}

std::vector<std::int64_t> random_sizes(Random& random, std::int64_t experts, std::int64_t rows) {
  std::vector<std::int64_t> sizes(experts, 0);
  const bool few = random.chance(3);  // only some experts get rows
  const std::int64_t active = few ? random.between(1, experts) : experts;
  for (std::int64_t r = random.chance(3) ? random.below(rows + 1) : 0; r < rows; ++r) {
    ++sizes[random.below(active)];
  }
  if (random.chance(8)) sizes[random.below(experts)] = -random.between(1, 100);
  if (random.chance(8)) sizes[random.below(experts)] += random.between(1, 2 * rows + 1);
  return sizes;
}

ProblemCase random_problem(Random& random) {
  ProblemCase c;
  c.name = "Random";
  c.topk = random.between(1, 10);
  c.rows = random.below(60) * c.topk;
  c.m_sizes = random_sizes(
      random, random.chance(5) ? random.between(1, 300) : random.between(1, 12), c.rows);
  c.n = random_extent(random, 300);
  c.k = random_extent(random, 300);
  c.permutation = static_cast<Permutation>(random.below(3));
  c.multiply = c.permutation == Permutation::kY && random.chance(2);
  c.weights_in_fp32 = random.chance(2);
  c.output_in_fp32 = random.chance(4);
  c.sizes_dtype = random.chance(2) ? DType::kInt64 : DType::kInt32;
  c.index_dtype = random.chance(2) ? DType::kInt64 : DType::kInt32;
  for (std::int64_t* padding : {&c.x_padding, &c.w_padding, &c.dy_padding, &c.out_padding}) {
    if (random.chance(4)) *padding = random.chance(3) ? random.between(1, 20) : 8;
  }
  if (random.chance(8)) c.base_offset = random.between(1, 9);
  for (std::int64_t bad = random.chance(4) ? random.between(1, 6) : 0; bad > 0; --bad) {
    c.bad_indices.push_back(random.chance(2) ? -random.between(1, 1000)
                                             : c.rows + random.below(1000));
  }
  if (random.chance(8)) c.repeated_indices = random.between(1, 6);
  if (random.chance(4)) c.tail_index = random.between(-2, 20);
  c.bad_absent_rows = random.chance(2);
  if (c.topk == 1 && c.rows > 0 && random.chance(2)) {
    for (int i = 0; i < 3; ++i) c.bad_rows.push_back(random.below(c.rows));
  }
  c.bad_tail = random.chance(3);
  return c;
}

Activation random_activation(Random& random) {
  Activation activation;
  activation.function = kActivationFunctions[random.below(std::ssize(kActivationFunctions))].value;
  activation.layout = kGateLayouts[random.below(std::ssize(kGateLayouts))].value;
  if (random.chance(2)) activation.limit = 2;
  if (random.chance(2)) activation.up_offset = 1;
  if (random.chance(2)) activation.alpha = 1.702f;
  return activation;
}

/// Weights of any format; K becomes what its groups divide.
void quantise(Random& random, ProblemCase& c) {
  struct Format {
    const char* text;
    ScaleType type;
    std::int64_t group;
  };
  constexpr Format kFormats[] = {
      {"mxfp4", ScaleType::kE8m0, 32},          {"fp8/128x128", ScaleType::kFloat32, 1},
      {"fp8/128x128", ScaleType::kBFloat16, 1}, {"fp8/channel", ScaleType::kFloat32, 1},
      {"fp8/tensor", ScaleType::kFloat16, 1},   {"fp8/channel", ScaleType::kE8m0, 1},
      {"int4/32", ScaleType::kBFloat16, 32},    {"int4/128", ScaleType::kFloat16, 128},
      {"nf4/64", ScaleType::kFloat32, 1},       {"nf4/32", ScaleType::kFloat32, 1}};
  const Format& format = kFormats[random.below(std::ssize(kFormats))];
  c.weights = format.text;
  c.scale_type = format.type;
  c.k = (c.k + format.group - 1) / format.group * format.group;
}

std::int64_t round_up(std::int64_t value) { return (value + 7) / 8 * 8; }

}  // namespace

RandomCase random_case(Random& random, bool aligned) {
  RandomCase drawn;
  ProblemCase& c = drawn.problem;
  c = random_problem(random);
  drawn.op = static_cast<Op>(random.below(3));
  drawn.dtype = kFloatingFormats[random.below(std::ssize(kFloatingFormats))].value;
  c.accumulate = drawn.op == Op::kDw && random.chance(3);
  c.dy_per_token = drawn.op != Op::kForward && c.permutation == Permutation::kY && random.chance(3);
  c.bias = drawn.op != Op::kDw && random.chance(4);
  const bool any_length = c.permutation == Permutation::kX || c.dy_per_token ||
                          (c.permutation == Permutation::kY && drawn.op == Op::kForward);
  if (any_length && random.chance(3)) {
    c.slots = random.below(90) * c.topk;
    c.multiply = false;
  }
  if (drawn.op != Op::kDw && !c.scatters(drawn.op) && !c.multiply && random.chance(4)) {
    c.activation = random_activation(random);
    c.product_scale = 0.25f;  // or their products of up to 300 terms would leave fp16's range
    std::int64_t& features = drawn.op == Op::kForward ? c.n : c.k;
    features += features % 2;
  }
  if (drawn.op != Op::kDw && random.chance(4)) quantise(random, c);
  if (aligned) {
    for (std::int64_t* extent :
         {&c.n, &c.k, &c.x_padding, &c.w_padding, &c.dy_padding, &c.out_padding, &c.base_offset}) {
      *extent = round_up(*extent);
    }
    if (drawn.dtype == DType::kFloat32) drawn.dtype = DType::kBFloat16;
  }
  return drawn;
}

}  // namespace moegemm::testing
