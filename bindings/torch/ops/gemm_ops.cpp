#include <torch/csrc/stable/stableivalue_conversions.h>

#include <optional>
#include <vector>

#include "product.h"
#include "registration.h"

namespace moegemm::torch_ops {
namespace {

using Config = std::optional<std::vector<std::int64_t>>;

/// A kernel asked for by hand, as a list of seven: rows, columns, depth, stages, then TMA for the
/// row operand, the weight operand and the store (1 asked for, 0 not asked for).
ProductOptions with_config(ProductOptions options, const Config& numbers) {
  if (!numbers) return options;
  if (numbers->size() != 7) {
    refuse_value("config has ", numbers->size(), " numbers; it must have 7");
  }
  const auto asked = [&](int i) {
    return (*numbers)[i] != 0 ? std::optional<bool>(true) : std::nullopt;
  };
  KernelConfig& config = options.gemm.config.emplace();
  config.block_rows = static_cast<int>((*numbers)[0]);
  config.block_columns = static_cast<int>((*numbers)[1]);
  config.block_depth = static_cast<int>((*numbers)[2]);
  config.stages = static_cast<int>((*numbers)[3]);
  config.tma_load_rows = asked(4);
  config.tma_load_weights = asked(5);
  config.tma_store = asked(6);
  return options;
}

/// What every product is given; the rest is for its operator to add.
ProductTensors tensors_of(const Tensor& first, const Tensor& second, const Tensor& m_sizes,
                          const std::optional<Tensor>& gather_indices,
                          const std::optional<Tensor>& router_weights,
                          const std::optional<Tensor>& w_scales = std::nullopt) {
  return {.first = first.get(),
          .second = second.get(),
          .m_sizes = m_sizes.get(),
          .gather_indices = handle_of(gather_indices),
          .router_weights = handle_of(router_weights),
          .w_scales = handle_of(w_scales)};
}

/// `activation` is a text for parse_activation, or empty.
ProductOptions with_activation(ProductOptions options, const std::string& activation) {
  if (!activation.empty()) options.gemm.activation = parse_activation(activation);
  return options;
}

/// activation(X W^T + bias), each if given. `words` are those of product.h.
Tensor forward(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
               const std::optional<Tensor>& gather_indices,
               const std::optional<Tensor>& router_weights, std::int64_t topk,
               const std::string& words, const Config& config, const std::optional<Tensor>& bias,
               const std::string& activation, const std::optional<Tensor>& w_scales,
               const std::string& w_format) {
  return raising([&] {
    ProductTensors tensors = tensors_of(x, w, m_sizes, gather_indices, router_weights, w_scales);
    tensors.bias = handle_of(bias);
    ProductOptions options = with_activation(with_config(read_options(words), config), activation);
    return Product(Op::kForward, tensors, topk, std::move(options), w_format).run().hand_over();
  });
}

/// `forward` of x, w and m_sizes with every other argument left to its default, on torch's stack as
/// it is: TORCH_BOX would allocate five times to share tensors that nobody shares.
void forward_plain(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  const auto take = [&](int i) {
    return OwnTensor(torch::stable::detail::to<AtenTensorHandle>(stack[i]));
  };
  const OwnTensor x = take(0);
  const OwnTensor w = take(1);
  const OwnTensor m_sizes = take(2);
  stack[0] = raising([&] {
    Product product(Op::kForward, {x.get(), w.get(), m_sizes.get()}, 1, {});
    return torch::stable::detail::from(product.run().own.release());
  });
}

/// dX of dY and W.
Tensor dx(const Tensor& dy, const Tensor& w, const Tensor& m_sizes,
          const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& router_weights,
          std::int64_t topk, const std::string& words, const Config& config,
          const std::optional<Tensor>& w_scales, const std::string& w_format) {
  return raising([&] {
    return Product(Op::kDx, tensors_of(dy, w, m_sizes, gather_indices, router_weights, w_scales),
                   topk, with_config(read_options(words), config), w_format)
        .run()
        .hand_over();
  });
}

/// dW of dY and X.
Tensor dw(const Tensor& dy, const Tensor& x, const Tensor& m_sizes,
          const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& router_weights,
          std::int64_t topk, const std::string& words, const Config& config) {
  return raising([&] {
    return Product(Op::kDw, tensors_of(dy, x, m_sizes, gather_indices, router_weights), topk,
                   with_config(read_options(words), config))
        .run()
        .hand_over();
  });
}

/// Forward with a low-rank part (moegemm::GemmOptions): an operator apart, so that others have no
/// more arguments to unpack.
Tensor forward_low_rank(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
                        const std::optional<Tensor>& gather_indices, const Tensor& low_rank_rows,
                        const Tensor& low_rank_weights, std::int64_t topk, const std::string& words,
                        const std::optional<Tensor>& bias, const std::string& activation,
                        const std::optional<Tensor>& w_scales, const std::string& w_format) {
  return raising([&] {
    ProductTensors tensors = tensors_of(x, w, m_sizes, gather_indices, {}, w_scales);
    tensors.bias = handle_of(bias);
    tensors.low_rank_rows = low_rank_rows.get();
    tensors.low_rank_weights = low_rank_weights.get();
    ProductOptions options = with_activation(read_options(words), activation);
    return Product(Op::kForward, tensors, topk, std::move(options), w_format).run().hand_over();
  });
}

/// The same of dX.
Tensor dx_low_rank(const Tensor& dy, const Tensor& w, const Tensor& m_sizes,
                   const std::optional<Tensor>& gather_indices, const Tensor& low_rank_rows,
                   const Tensor& low_rank_weights, std::int64_t topk, const std::string& words,
                   const std::optional<Tensor>& w_scales, const std::string& w_format) {
  return raising([&] {
    ProductTensors tensors = tensors_of(dy, w, m_sizes, gather_indices, {}, w_scales);
    tensors.low_rank_rows = low_rank_rows.get();
    tensors.low_rank_weights = low_rank_weights.get();
    return Product(Op::kDx, tensors, topk, read_options(words), w_format).run().hand_over();
  });
}

/// `forward`, `dx` or `dw` into `out`, without an activation.
void product_into(Op op, ProductTensors tensors, std::int64_t topk, const std::string& words,
                  const Config& config, const Tensor& out, const std::string& w_format = {}) {
  tensors.out = out.get();
  raising([&] {
    Product(op, tensors, topk, with_config(read_options(words), config), w_format).run_into_out();
  });
}

/// `forward` with W in two tensors (moegemm::GemmOptions::w_up): an operator apart, likewise.
Tensor forward_pair(const Tensor& x, const Tensor& w, const Tensor& w_up, const Tensor& m_sizes,
                    const std::optional<Tensor>& gather_indices, std::int64_t topk,
                    const std::string& words, const std::optional<Tensor>& bias,
                    const std::string& activation) {
  return raising([&] {
    ProductTensors tensors = tensors_of(x, w, m_sizes, gather_indices, {});
    tensors.bias = handle_of(bias);
    tensors.w_up = w_up.get();
    ProductOptions options = with_activation(read_options(words), activation);
    return Product(Op::kForward, tensors, topk, std::move(options)).run().hand_over();
  });
}

void forward_out(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
                 const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& router_weights, std::int64_t topk,
                 const std::string& words, const Config& config, const Tensor& out,
                 const std::optional<Tensor>& bias, const std::optional<Tensor>& w_scales,
                 const std::string& w_format) {
  ProductTensors tensors = tensors_of(x, w, m_sizes, gather_indices, router_weights, w_scales);
  tensors.bias = handle_of(bias);
  product_into(Op::kForward, tensors, topk, words, config, out, w_format);
}

/// `dx`, or `dx_low_rank`, into `out`.
void dx_out(const Tensor& dy, const Tensor& w, const Tensor& m_sizes,
            const std::optional<Tensor>& gather_indices,
            const std::optional<Tensor>& router_weights, std::int64_t topk,
            const std::string& words, const Config& config, const Tensor& out,
            const std::optional<Tensor>& w_scales, const std::string& w_format,
            const std::optional<Tensor>& low_rank_rows,
            const std::optional<Tensor>& low_rank_weights) {
  ProductTensors tensors = tensors_of(dy, w, m_sizes, gather_indices, router_weights, w_scales);
  tensors.low_rank_rows = handle_of(low_rank_rows);
  tensors.low_rank_weights = handle_of(low_rank_weights);
  product_into(Op::kDx, tensors, topk, words, config, out, w_format);
}

void dw_out(const Tensor& dy, const Tensor& x, const Tensor& m_sizes,
            const std::optional<Tensor>& gather_indices,
            const std::optional<Tensor>& router_weights, std::int64_t topk,
            const std::string& words, const Config& config, const Tensor& out) {
  product_into(Op::kDw, tensors_of(dy, x, m_sizes, gather_indices, router_weights), topk, words,
               config, out);
}

Op op_named(const std::string& name) {
  if (name == "forward") return Op::kForward;
  if (name == "dx") return Op::kDx;
  if (name == "dw") return Op::kDw;
  refuse_value("op is '", name, "'; accepted are forward, dx and dw");
}

/// Refuses the config of a product that comes later, as that would. `argument` is what the caller
/// calls it.
void check_config(const std::string& argument, const std::string& name, const std::string& words,
                  const std::vector<std::int64_t>& config) {
  raising([&] {
    const Op op = op_named(name);
    const GemmOptions options = with_config(read_options(words), config).gemm;
    const std::string rows = argument + (op == Op::kDx ? ".use_tma_load_dy" : ".use_tma_load_x");
    const std::string others = argument + (op == Op::kDw ? ".use_tma_load_dy" : ".use_tma_load_w");
    const std::string store = argument + ".use_tma_store";
    CallerWords own;
    own.tma_load_rows = rows.c_str();
    own.tma_load_weights = others.c_str();
    own.tma_store = store.c_str();
    own.yes = "True";
    moegemm::check_config(*options.config, op,
                          options.permute_x   ? Permutation::kX
                          : options.permute_y ? Permutation::kY
                                              : Permutation::kNone,
                          own);
  });
}

/// Measures one product ("forward", "dx" or "dw") as `moegemm::tune_forward` does; the report as
/// JSON.
std::string tune(const std::string& name, const Tensor& first, const Tensor& second,
                 const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& router_weights, std::int64_t topk,
                 const std::string& words, double budget_seconds, bool again,
                 const std::optional<Tensor>& w_scales, const std::string& w_format) {
  return raising([&] {
    Product product(op_named(name),
                    tensors_of(first, second, m_sizes, gather_indices, router_weights, w_scales),
                    topk, read_options(words), w_format);
    return product.tune(budget_seconds, again);
  });
}

// `options` are the words of product.h, `activation` a text as of moegemm::to_string, `config` the
// seven numbers of with_config: fewer boxed arguments are what keeps a tiny call cheap, and those
// left to their defaults cost the least.
constexpr Operator kOperators[] = {
    {"forward(Tensor x, Tensor w, Tensor m_sizes, Tensor? gather_indices=None, "
     "Tensor? router_weights=None, int topk=1, str options=\"\", int[]? config=None, "
     "Tensor? bias=None, str activation=\"\", Tensor? w_scales=None, str w_format=\"\") -> Tensor",
     TORCH_BOX(&forward)},
    // A shortcut; python/moegemm/operators/shortcuts.py says what it saves.
    {"forward_plain(Tensor x, Tensor w, Tensor m_sizes) -> Tensor", &forward_plain},
    {"dx(Tensor dy, Tensor w, Tensor m_sizes, Tensor? gather_indices=None, "
     "Tensor? router_weights=None, int topk=1, str options=\"\", int[]? config=None, "
     "Tensor? w_scales=None, str w_format=\"\") -> Tensor",
     TORCH_BOX(&dx)},
    {"dw(Tensor dy, Tensor x, Tensor m_sizes, Tensor? gather_indices=None, "
     "Tensor? router_weights=None, int topk=1, str options=\"\", int[]? config=None) -> Tensor",
     TORCH_BOX(&dw)},
    {"forward_low_rank(Tensor x, Tensor w, Tensor m_sizes, Tensor? gather_indices, "
     "Tensor low_rank_rows, Tensor low_rank_weights, int topk=1, str options=\"\", "
     "Tensor? bias=None, str activation=\"\", Tensor? w_scales=None, str w_format=\"\") -> Tensor",
     TORCH_BOX(&forward_low_rank)},
    {"forward_pair(Tensor x, Tensor w, Tensor w_up, Tensor m_sizes, Tensor? gather_indices=None, "
     "int topk=1, str options=\"\", Tensor? bias=None, str activation=\"\") -> Tensor",
     TORCH_BOX(&forward_pair)},
    {"dx_low_rank(Tensor dy, Tensor w, Tensor m_sizes, Tensor? gather_indices, "
     "Tensor low_rank_rows, Tensor low_rank_weights, int topk=1, str options=\"\", "
     "Tensor? w_scales=None, str w_format=\"\") -> Tensor",
     TORCH_BOX(&dx_low_rank)},
    {"forward_out(Tensor x, Tensor w, Tensor m_sizes, Tensor? gather_indices, "
     "Tensor? router_weights, int topk, str options, int[]? config, Tensor(a!) out, "
     "Tensor? bias=None, Tensor? w_scales=None, str w_format=\"\") -> ()",
     TORCH_BOX(&forward_out)},
    {"dx_out(Tensor dy, Tensor w, Tensor m_sizes, Tensor? gather_indices, "
     "Tensor? router_weights, int topk, str options, int[]? config, Tensor(a!) out, "
     "Tensor? w_scales=None, str w_format=\"\", Tensor? low_rank_rows=None, "
     "Tensor? low_rank_weights=None) -> ()",
     TORCH_BOX(&dx_out)},
    {"dw_out(Tensor dy, Tensor x, Tensor m_sizes, Tensor? gather_indices, "
     "Tensor? router_weights, int topk, str options, int[]? config, Tensor(a!) out) -> ()",
     TORCH_BOX(&dw_out)},
    {"tune(str op, Tensor first, Tensor second, Tensor m_sizes, Tensor? gather_indices, "
     "Tensor? router_weights, int topk, str options, float budget_seconds, bool again, "
     "Tensor? w_scales=None, str w_format=\"\") -> str",
     TORCH_BOX(&tune)},
};

constexpr Operator kRules[] = {
    {"check_config(str argument, str op, str options, int[] config) -> ()",
     TORCH_BOX(&check_config)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)
MOEGEMM_REGISTER_WITHOUT_TENSORS(kRules)

}  // namespace moegemm::torch_ops
