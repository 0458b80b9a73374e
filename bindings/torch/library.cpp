#include <torch/csrc/stable/library.h>

#include "moegemm/error.h"
#include "operators.h"
#include "runtime/execution.h"
#include "runtime/torch_tuning.h"

// Through macros of our own: torch's would take the name of ours for the namespace.
#define MOEGEMM_LIBRARY(space, m) STABLE_TORCH_LIBRARY(space, m)
#define MOEGEMM_LIBRARY_IMPL(space, key, m) STABLE_TORCH_LIBRARY_IMPL(space, key, m)

MOEGEMM_LIBRARY(MOEGEMM_TORCH_NAMESPACE, m) {
  // `options` are the words of product.h, `activation` a text as of moegemm::to_string, `config`
  // the seven numbers of gemm_ops.cpp: fewer boxed arguments are what keeps a tiny call cheap, and
  // those left to their defaults cost the least.
  m.def(
      "forward(Tensor x, Tensor w, Tensor m_sizes, Tensor? gather_indices=None, "
      "Tensor? router_weights=None, int topk=1, str options=\"\", int[]? config=None, "
      "Tensor? bias=None, str activation=\"\") -> Tensor");
  // A shortcut; python/moegemm/operators/shortcuts.py says what it saves.
  m.def("forward_plain(Tensor x, Tensor w, Tensor m_sizes) -> Tensor");
  m.def(
      "dx(Tensor dy, Tensor w, Tensor m_sizes, Tensor? gather_indices=None, "
      "Tensor? router_weights=None, int topk=1, str options=\"\", int[]? config=None) -> Tensor");
  m.def(
      "dw(Tensor dy, Tensor x, Tensor m_sizes, Tensor? gather_indices=None, "
      "Tensor? router_weights=None, int topk=1, str options=\"\", int[]? config=None) -> Tensor");
  m.def(
      "forward_out(Tensor x, Tensor w, Tensor m_sizes, Tensor? gather_indices, "
      "Tensor? router_weights, int topk, str options, int[]? config, Tensor(a!) out, "
      "Tensor? bias=None) -> ()");
  m.def(
      "dx_out(Tensor dy, Tensor w, Tensor m_sizes, Tensor? gather_indices, "
      "Tensor? router_weights, int topk, str options, int[]? config, Tensor(a!) out) -> ()");
  m.def(
      "dw_out(Tensor dy, Tensor x, Tensor m_sizes, Tensor? gather_indices, "
      "Tensor? router_weights, int topk, str options, int[]? config, Tensor(a!) out) -> ()");
  m.def(
      "route(Tensor expert_ids, int num_experts, bool wide, bool with_inverse) -> (Tensor, Tensor, "
      "Tensor)");
  m.def("combine(Tensor rows, Tensor? weights, int topk, bool float32_output) -> Tensor");
  m.def("combine_out(Tensor rows, Tensor? weights, int topk, Tensor(a!) out) -> ()");
  m.def(
      "route_compact(Tensor expert_ids, int num_experts, SymInt max_rows, Tensor? num_tokens, "
      "Tensor(a!)? overflow, bool wide, bool check) -> (Tensor, Tensor, Tensor)");
  m.def(
      "combine_rows(Tensor rows, Tensor? weights, Tensor positions, bool float32_output) -> "
      "Tensor");
  m.def("combine_rows_out(Tensor rows, Tensor? weights, Tensor positions, Tensor(a!) out) -> ()");
  m.def(
      "scale_rows(Tensor(a!) product, Tensor x, Tensor m_sizes, Tensor gather_indices, "
      "Tensor router_weights, int topk) -> Tensor");
  m.def(
      "check_layer(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor expert_ids, "
      "Tensor? router_weights, Tensor? gate_up_bias, Tensor? down_bias, str activation, "
      "bool transposed, Tensor? w_up=None) -> ()");
  m.def(
      "check_expert_rows(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor sizes, "
      "Tensor? row_weights, Tensor? gate_up_bias, Tensor? down_bias, str activation, "
      "bool transposed, Tensor? w_up=None) -> ()");
  m.def(
      "activate(Tensor pre, Tensor? bias, Tensor m_sizes, str activation, "
      "Tensor? row_weights=None) -> Tensor");
  m.def(
      "add_weighted_bias(Tensor rows, Tensor bias, Tensor m_sizes, Tensor row_weights, "
      "Tensor(a!) out) -> ()");
  m.def(
      "activate_backward(Tensor(a!) d_act, Tensor pre, Tensor? bias, Tensor m_sizes, "
      "Tensor? gather_indices, Tensor? router_weights, int topk, Tensor? d_out, Tensor? down_bias, "
      "str activation, bool need_weighted_act, bool need_d_weights) -> (Tensor, Tensor)");
  m.def(
      "expert_sums(Tensor rows, Tensor m_sizes, Tensor? gather_indices, Tensor? router_weights, "
      "int topk) -> Tensor");
  m.def(
      "tune(str op, Tensor first, Tensor second, Tensor m_sizes, Tensor? gather_indices, "
      "Tensor? router_weights, int topk, str options, float budget_seconds, bool again) -> str");
  m.def("set_tune_progress(int address) -> ()");
  m.def("tuning_cache() -> str");
  m.def("info() -> str");
  m.def("load_kernels(int device) -> int");
  m.def("loads_early() -> bool");
  m.def("take_notes() -> str");
}

namespace {

void implement(torch::stable::detail::StableLibrary& m) {
  using namespace moegemm;
  m.impl("forward", TORCH_BOX(&torch_ops::forward));
  m.impl("forward_plain", &torch_ops::forward_plain);
  m.impl("dx", TORCH_BOX(&torch_ops::gradient<Op::kDx>));
  m.impl("dw", TORCH_BOX(&torch_ops::gradient<Op::kDw>));
  m.impl("forward_out", TORCH_BOX(&torch_ops::forward_out));
  m.impl("dx_out", TORCH_BOX(&torch_ops::product_out<Op::kDx>));
  m.impl("dw_out", TORCH_BOX(&torch_ops::product_out<Op::kDw>));
  m.impl("route", TORCH_BOX(&torch_ops::route));
  m.impl("combine", TORCH_BOX(&torch_ops::combine));
  m.impl("combine_out", TORCH_BOX(&torch_ops::combine_out));
  m.impl("route_compact", TORCH_BOX(&torch_ops::route_compact));
  m.impl("combine_rows", TORCH_BOX(&torch_ops::combine_rows));
  m.impl("combine_rows_out", TORCH_BOX(&torch_ops::combine_rows_out));
  m.impl("scale_rows", TORCH_BOX(&torch_ops::scale_rows));
  m.impl("check_layer", TORCH_BOX(&torch_ops::check_layer));
  m.impl("check_expert_rows", TORCH_BOX(&torch_ops::check_expert_rows));
  m.impl("activate", TORCH_BOX(&torch_ops::activate));
  m.impl("add_weighted_bias", TORCH_BOX(&torch_ops::add_weighted_bias));
  m.impl("activate_backward", TORCH_BOX(&torch_ops::activate_backward));
  m.impl("expert_sums", TORCH_BOX(&torch_ops::expert_sums));
  m.impl("tune", TORCH_BOX(&torch_ops::tune));
}

}  // namespace

MOEGEMM_LIBRARY_IMPL(MOEGEMM_TORCH_NAMESPACE, CPU, m) { implement(m); }
MOEGEMM_LIBRARY_IMPL(MOEGEMM_TORCH_NAMESPACE, CUDA, m) { implement(m); }
MOEGEMM_LIBRARY_IMPL(MOEGEMM_TORCH_NAMESPACE, CompositeExplicitAutograd, m) {
  // Loading is the first thing that happens: from here on warnings reach Python's.
  moegemm::set_warning_handler(
      [](const std::string& message) { moegemm::torch_ops::note_once(message, false); });
  m.impl("set_tune_progress", TORCH_BOX(&moegemm::torch_ops::set_tune_progress));
  m.impl("tuning_cache", TORCH_BOX(&moegemm::torch_ops::tuning_cache));
  m.impl("info", TORCH_BOX(&moegemm::torch_ops::info));
  m.impl("load_kernels", TORCH_BOX(&moegemm::torch_ops::load_kernels));
  m.impl("loads_early", TORCH_BOX(&moegemm::torch_ops::loads_early));
  m.impl("take_notes", TORCH_BOX(&moegemm::torch_ops::take_notes));
}
