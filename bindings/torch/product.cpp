#include "product.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "routing_arguments.h"
#include "runtime/execution.h"
#include "runtime/torch_memory.h"
#include "runtime/torch_tuning.h"

namespace moegemm::torch_ops {
namespace {

/// Those of grouped_gemm and its like.
constexpr CallerWords kWords = {.x = "X",
                                .w = "W",
                                .dy = "dY",
                                .out = "out",
                                .router_weights = "topk_weights",
                                .multiply = "fuse_mul_post",
                                .yes = "True",
                                .no = "False",
                                .none = "None"};

struct Flag {
  std::string_view word;
  bool GemmOptions::*flag;
};
constexpr Flag kFlags[] = {
    {"permute_x", &GemmOptions::permute_x},   {"permute_y", &GemmOptions::permute_y},
    {"multiply", &GemmOptions::multiply},     {"dy_per_token", &GemmOptions::dy_per_token},
    {"accumulate", &GemmOptions::accumulate}, {"allow_tf32", &GemmOptions::allow_tf32},
    {"autotune", &GemmOptions::autotune},     {"check", &GemmOptions::check},
};

constexpr std::string_view kExpectedRows = "expected_rows=";

void read_word(std::string_view word, ProductOptions& options) {
  for (const Flag& flag : kFlags) {
    if (word == flag.word) {
      options.gemm.*flag.flag = true;
      return;
    }
  }
  if (word == "transposed") {
    options.gemm.weight_layout = WeightLayout::kKn;
  } else if (word == "float32_output") {
    options.float32_output = true;
  } else if (word == "rows_pending") {
    options.rows_pending = true;
  } else if (word == "warn_at_once") {
    options.warn_at_once = true;
  } else if (word == "tails_undefined") {
    options.tails = Tails::kUndefined;
  } else if (word.starts_with(kExpectedRows)) {
    const std::string_view number = word.substr(kExpectedRows.size());
    const char* const end = number.data() + number.size();
    const auto [rest, error] = std::from_chars(number.data(), end, options.expected_rows);
    if (error != std::errc{} || rest != end) {
      refuse_value("expected_rows is ", number, "; a whole number below 2^63 is accepted");
    }
  } else {
    std::string known;
    for (const Flag& flag : kFlags) known.append(flag.word).append(", ");
    refuse_value("options has the word '", word, "'; accepted are ", known,
                 "transposed, float32_output, rows_pending, warn_at_once, tails_undefined and "
                 "expected_rows=...");
  }
}

}  // namespace

ProductOptions read_options(const std::string& words) {
  ProductOptions options;
  const std::string_view all = words;
  for (std::size_t begin = 0; begin < all.size();) {
    const std::size_t end = std::min(all.find(' ', begin), all.size());
    if (end > begin) read_word(all.substr(begin, end - begin), options);
    begin = end + 1;
  }
  return options;
}

Product::Product(Op op, const ProductTensors& tensors, std::int64_t topk, ProductOptions options,
                 const std::string& w_format)
    : first_(op == Op::kForward ? "X" : "dY", tensors.first),
      second_(op == Op::kDw ? "X" : "W", w_format.empty() ? tensors.second : nullptr),
      m_sizes_("m_sizes", tensors.m_sizes),
      bias_("bias", tensors.bias),
      out_("out", tensors.out),
      low_rank_rows_("low_rank_rows", tensors.low_rank_rows),
      low_rank_weights_("low_rank_weights", tensors.low_rank_weights),
      w_up_("w_up", tensors.w_up),
      topk_(topk),
      options_(std::move(options)) {
  GemmOptions& gemm = options_.gemm;
  // Tensors that the options give no part to play are not looked at.
  if (gemm.permute_x || gemm.permute_y) {
    gather_indices_ = Argument("gather_indices", tensors.gather_indices);
  }
  if (gemm.multiply) router_weights_ = Argument("topk_weights", tensors.router_weights);
  gemm.bias = bias_.metadata();
  gemm.w_up = w_up_.metadata();
  gemm.low_rank_rows = low_rank_rows_.metadata();
  gemm.low_rank_weights = low_rank_weights_.metadata();
  if (!w_format.empty()) {
    packed_ = std::make_unique<PackedWeight>("W", tensors.second, "w_scales", tensors.w_scales,
                                             w_format, first_.dtype());
    gemm.quantization = packed_->quantization();
    gemm.w_scales = packed_->scales();
  } else if (tensors.w_scales != nullptr) {
    refuse_value("w_scales is given and w_format is ''; only a quantised W has scales");
  }
  description_ =
      describe(op, first_.metadata(), packed_ ? packed_->view() : second_.metadata(),
               routing(m_sizes_.metadata(), gather_indices_.metadata(), router_weights_.metadata()),
               gemm, out_.metadata(), kWords);
}

Output Product::allocate_output() const {
  const Problem& problem = description_.problem;
  return allocate(description_.out_rank, description_.out_shape,
                  options_.float32_output ? DType::kFloat32 : problem.dtype, problem.device);
}

RoutingView Product::routing(const TensorView& m_sizes, const TensorView& gather_indices,
                             const TensorView& router_weights) const {
  RoutingView routing{{}, gather_indices, router_weights, topk_};
  routing.tails = options_.tails;
  routing.expected_rows = options_.expected_rows;
  return with_segments(m_sizes, routing);
}

RoutingView Product::readable_routing() {
  return routing(m_sizes_.readable(), gather_indices_.readable(), router_weights_.readable_dense());
}

const TensorView& Product::readable_second() {
  if (!packed_) return second_.readable();
  packed_->read();
  options_.gemm.w_scales = packed_->scales();
  return packed_->view();
}

bool Product::copied() const {
  for (const Argument* argument : {&first_, &second_, &m_sizes_, &gather_indices_, &router_weights_,
                                   &bias_, &low_rank_rows_, &low_rank_weights_, &w_up_}) {
    if (argument->copied()) return true;
  }
  return packed_ && packed_->copied();
}

Output Product::run() {
  Output result = allocate_output();
  run(result.view);
  return result;
}

void Product::run(const TensorView& out) {
  const RoutingView routing = readable_routing();
  const TensorView& first = first_.readable();
  const TensorView& second = readable_second();
  options_.gemm.bias = bias_.readable();
  options_.gemm.w_up = w_up_.readable();
  options_.gemm.low_rank_rows = low_rank_rows_.readable();
  options_.gemm.low_rank_weights = low_rank_weights_.readable();
  const Execution execution(description_.problem.device, description_.problem.flops());
  TorchMemory memory;
  TorchTuning tuning;
  ExecutionContext context =
      options_.gemm.autotune
          ? tuning.context(execution)
          : execution.context(LaunchAhead::kWritesRows, options_.rows_pending && !copied());
  context.memory = &memory;
  const Plan plan = moegemm::run(description_, first, second, out, routing, options_.gemm, context);
  if (!plan.note.empty()) note_once(plan.note, options_.warn_at_once);
}

std::string Product::tune(double budget_seconds, bool again) {
  const Output result = allocate_output();
  const RoutingView routing = readable_routing();
  const TensorView& first = first_.readable();
  const TensorView& second = readable_second();
  const Execution execution(description_.problem.device, description_.problem.flops());
  TorchTuning tuning;
  tuning.budget_seconds = budget_seconds;
  TorchMemory memory;  // the calls will have it, so that plans may use it
  ExecutionContext context = tuning.context(execution);
  context.memory = &memory;
  return as_json(moegemm::tune(description_, first, second, result.view, routing, options_.gemm,
                               context, again));
}

}  // namespace moegemm::torch_ops
