#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "moegemm/kinds.h"

/// The operators of torch.ops.moegemm; library.cpp has their schemas. All of them run on CPU
/// and CUDA tensors alike.
namespace moegemm::torch_ops {

using Config = std::optional<std::vector<std::int64_t>>;

/// activation(X W^T + bias), each if given. `words` are those of product.h, `activation` is a text
/// for parse_activation.
Tensor forward(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
               const std::optional<Tensor>& gather_indices,
               const std::optional<Tensor>& router_weights, std::int64_t topk,
               const std::string& words, const Config& config, const std::optional<Tensor>& bias,
               const std::string& activation);
/// `forward` of x, w and m_sizes with every other argument left to its default, on torch's stack as
/// it is: TORCH_BOX would allocate five times to share tensors that nobody shares.
void forward_plain(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs);
/// dX of dY and W, or dW of dY and X.
template <Op op>
Tensor gradient(const Tensor& first, const Tensor& second, const Tensor& m_sizes,
                const std::optional<Tensor>& gather_indices,
                const std::optional<Tensor>& router_weights, std::int64_t topk,
                const std::string& words, const Config& config);
/// `forward` into `out`, without an activation.
void forward_out(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
                 const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& router_weights, std::int64_t topk,
                 const std::string& words, const Config& config, const Tensor& out,
                 const std::optional<Tensor>& bias);
/// dX or dW, into `out`.
template <Op op>
void product_out(const Tensor& first, const Tensor& second, const Tensor& m_sizes,
                 const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& router_weights, std::int64_t topk,
                 const std::string& words, const Config& config, const Tensor& out);

/// m_sizes, gather_indices and (empty unless asked for) the inverse permutation.
std::tuple<Tensor, Tensor, Tensor> route(const Tensor& expert_ids, std::int64_t num_experts,
                                         bool wide, bool with_inverse);
Tensor combine(const Tensor& rows, const std::optional<Tensor>& weights, std::int64_t topk,
               bool float32_output);
void combine_out(const Tensor& rows, const std::optional<Tensor>& weights, std::int64_t topk,
                 const Tensor& out);
/// m_sizes, gather_indices [max_rows] and positions [T, topk]; see moegemm::route_compact.
std::tuple<Tensor, Tensor, Tensor> route_compact(const Tensor& expert_ids, std::int64_t num_experts,
                                                 std::int64_t max_rows,
                                                 const std::optional<Tensor>& num_tokens,
                                                 const std::optional<Tensor>& overflow, bool wide,
                                                 bool check);
Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& weights,
                    const Tensor& positions, bool float32_output);
void combine_rows_out(const Tensor& rows, const std::optional<Tensor>& weights,
                      const Tensor& positions, const Tensor& out);
/// Scales `product` in place and returns the dot products; see moegemm::scale_rows.
Tensor scale_rows(const Tensor& product, const Tensor& x, const Tensor& m_sizes,
                  const Tensor& gather_indices, const Tensor& router_weights, std::int64_t topk);

/// See moegemm::check_layer.
void check_layer(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor expert_ids,
                 std::optional<Tensor> router_weights, std::optional<Tensor> gate_up_bias,
                 std::optional<Tensor> down_bias, std::string activation, bool transposed,
                 std::optional<Tensor> w_up);
/// See moegemm::check_expert_rows.
void check_expert_rows(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor sizes,
                       std::optional<Tensor> row_weights, std::optional<Tensor> gate_up_bias,
                       std::optional<Tensor> down_bias, std::string activation, bool transposed,
                       std::optional<Tensor> w_up);
Tensor activate(Tensor pre, std::optional<Tensor> bias, Tensor m_sizes, std::string activation,
                std::optional<Tensor> row_weights);
/// See moegemm::add_weighted_bias.
void add_weighted_bias(Tensor rows, Tensor bias, Tensor m_sizes, Tensor row_weights, Tensor out);
/// d_pre and (empty unless asked for) d_weights; with need_weighted_act the weighted activation
/// replaces d_act. See moegemm::activate_backward.
std::tuple<Tensor, Tensor> activate_backward(Tensor d_act, Tensor pre, std::optional<Tensor> bias,
                                             Tensor m_sizes, std::optional<Tensor> gather_indices,
                                             std::optional<Tensor> router_weights,
                                             std::int64_t topk, std::optional<Tensor> d_out,
                                             std::optional<Tensor> down_bias,
                                             std::string activation, bool need_weighted_act,
                                             bool need_d_weights);
Tensor expert_sums(Tensor rows, Tensor m_sizes, std::optional<Tensor> gather_indices,
                   std::optional<Tensor> router_weights, std::int64_t topk);
/// Measures one product ("forward", "dx" or "dw") as `moegemm::tune_forward` does; the report as
/// JSON.
std::string tune(const std::string& name, const Tensor& first, const Tensor& second,
                 const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& router_weights, std::int64_t topk,
                 const std::string& words, double budget_seconds, bool again);

/// See moegemm::load_kernels, for a CUDA device.
std::int64_t load_kernels(std::int64_t device);
/// See moegemm::loads_early; checks the environment's names too.
bool loads_early();
/// What moegemm.info() shows, as JSON.
std::string info();

/// Runs `body` and rethrows the library's errors as ones that torch can carry: a std::runtime_error
/// whose text starts with the Python type to raise, which python/moegemm/operators/errors.py puts
/// back.
template <class Body>
auto raising(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    const char* type = "RuntimeError";
    switch (error.kind()) {
      case ErrorKind::kInvalidValue:
        type = "ValueError";
        break;
      case ErrorKind::kInvalidType:
        type = "TypeError";
        break;
      case ErrorKind::kNotImplemented:
        type = "NotImplementedError";
        break;
      case ErrorKind::kRuntime:
        break;
    }
    throw std::runtime_error(std::string("[") + type + "] " + error.what());
  }
}

}  // namespace moegemm::torch_ops
