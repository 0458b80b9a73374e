#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "core/types/constant_of.h"
#include "cpu/activation_functions.h"
#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/passes/rows.h"

namespace moegemm::cpu {
namespace {

/// Of one worker: an exponential is some 5 ns.
constexpr std::int64_t kGrainElems = 8 * 1024;

/// The activation of one element and its derivatives.
struct Activated {
  float act;
  float d_gate;
  float d_up;
};

template <ActivationFunction F>
Activated evaluate(const Activation& a, float gate, float up) {
  const bool gate_passes = !(gate > a.limit);
  const Point f = Function<F>::at(gate_passes ? gate : a.limit, a.alpha);
  const float d_gate = gate_passes ? f.slope : 0.0f;
  if (!a.gated()) return {f.value, d_gate, 0.0f};
  const bool up_passes = !(up > a.limit || up < -a.limit);
  const float factor = (up_passes ? up : std::copysign(a.limit, up)) + a.up_offset;
  return {f.value * factor, d_gate * factor, up_passes ? f.value : 0.0f};
}

/// Where element c of a row has its gate and up.
struct Columns {
  std::int64_t step;
  std::int64_t up;

  Columns(const Activation& activation, std::int64_t activated)
      : step(activation.layout == GateLayout::kInterleaved ? 2 : 1),
        up(activation.layout == GateLayout::kInterleaved ? 1 : activated) {}
  std::int64_t gate_at(std::int64_t c) const { return c * step; }
  std::int64_t up_at(std::int64_t c) const { return up + c * step; }
};

/// Each row's expert, -1 outside the segments; of two owners the later one.
std::vector<std::int32_t> experts_of(const RoutingView& routing, std::int64_t rows) {
  std::vector<std::int32_t> experts(rows, -1);
  const SegmentList segments = segments_of(routing, rows);
  for (std::size_t e = 0; e < segments.segments.size(); ++e) {
    const SegmentList::Segment& segment = segments.segments[e];
    std::fill(experts.begin() + segment.begin, experts.begin() + segment.end,
              static_cast<std::int32_t>(e));
  }
  return experts;
}

/// body(row, expert) for the rows of every segment, by all workers, of `columns` elements each. The
/// other rows of `outputs` become zero, or stay as they are where tails are undefined.
template <typename Body>
void for_each_row_of_experts(const ExecutionContext& context, const RoutingView& routing,
                             std::int64_t rows, std::int64_t columns,
                             std::initializer_list<const TensorView*> outputs, const Body& body) {
  const std::vector<std::int32_t> expert_of = experts_of(routing, rows);
  for_each_range(context, rows, grain_rows(kGrainElems, columns),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t r = begin; r < end; ++r) {
                     if (expert_of[r] >= 0) {
                       body(r, std::int64_t{expert_of[r]});
                     } else if (routing.tails != Tails::kUndefined) {
                       for (const TensorView* output : outputs) zero_row(*output, r);
                     }
                   }
                 });
}

/// A row of the first product with its expert's bias.
template <typename T>
struct BiasedRow {
  const T* pre;
  const T* bias;

  BiasedRow(const TensorView& pre_view, const TensorView& bias_view, std::int64_t row,
            std::int64_t expert)
      : pre(row_of<const T>(pre_view, row)),
        bias(bias_view.given() ? row_of<const T>(bias_view, expert) : nullptr) {}
  float operator[](std::int64_t c) const {
    return bias == nullptr ? to_float(pre[c]) : to_float(pre[c]) + to_float(bias[c]);
  }
};

template <typename T>
double dot(const T* a, const T* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(to_float(a[i])) * static_cast<double>(to_float(b[i]));
  }
  return sum;
}

/// One row of the backward; returns <d_act, act>. A double sum costs nothing beside the
/// exponentials.
template <ActivationFunction F, typename T>
double backward_row(const ActivationGradientInputs& in, const Activation& activation,
                    const ActivationGradientOutputs& out, std::int64_t r, std::int64_t expert,
                    float weight) {
  const std::int64_t activated = in.d_act.shape[1];
  const Columns columns(activation, activated);
  const BiasedRow<T> row(in.pre, in.bias, r, expert);
  double sum = 0;
  for (std::int64_t c = 0; c < activated; ++c) {
    const float up = activation.gated() ? row[columns.up_at(c)] : 0.0f;
    const Activated a = evaluate<F>(activation, row[columns.gate_at(c)], up);
    const float gradient = read_float(in.d_act.data, in.d_act.dtype, r * in.d_act.row_stride + c);
    sum += static_cast<double>(gradient) * static_cast<double>(a.act);
    const float weighted = weight * gradient;
    const std::int64_t d_pre = r * out.d_pre.row_stride;
    write_float(out.d_pre.data, out.d_pre.dtype, d_pre + columns.gate_at(c), weighted * a.d_gate);
    if (activation.gated()) {
      write_float(out.d_pre.data, out.d_pre.dtype, d_pre + columns.up_at(c), weighted * a.d_up);
    }
    if (out.weighted_act.given()) {
      write_float(out.weighted_act.data, out.weighted_act.dtype,
                  r * out.weighted_act.row_stride + c, weight * a.act);
    }
  }
  return sum;
}

}  // namespace

void CpuPasses::activate(const TensorView& pre, const TensorView& bias, const RoutingView& routing,
                         const Activation& activation, const TensorView& act,
                         const ExecutionContext& context) const {
  const std::int64_t activated = act.shape[1];
  const Columns columns(activation, activated);
  with_constant<kActivationFunctions>(activation.function, [&]<ActivationFunction F>() {
    with_element_type(pre.dtype, [&]<typename T>(T*) {
      with_element_type(act.dtype, [&]<typename Out>(Out*) {
        const auto activate_row = [&](std::int64_t r, std::int64_t expert) {
          const BiasedRow<T> row(pre, bias, r, expert);
          const float weight = router_weight(routing, r);
          Out* to = row_of<Out>(act, r);
          for (std::int64_t c = 0; c < activated; ++c) {
            const float up = activation.gated() ? row[columns.up_at(c)] : 0.0f;
            const float gate = row[columns.gate_at(c)];
            store(weight * evaluate<F>(activation, gate, up).act, to[c]);
          }
        };
        for_each_row_of_experts(context, routing, pre.shape[0], activated, {&act}, activate_row);
      });
    });
  });
}

void CpuPasses::activate_backward(const ActivationGradientInputs& in, const RoutingView& routing,
                                  const Activation& activation,
                                  const ActivationGradientOutputs& out,
                                  const ExecutionContext& context) const {
  const std::int64_t rows = in.pre.shape[0];
  const TensorView& d_weights = out.d_weights;
  // Written by index below: what no row names stays zero.
  const std::int64_t flat_rows = flat_rows_of(routing, out, rows);
  for (std::int64_t i = 0; d_weights.given() && i < flat_rows; ++i) {
    write_float(d_weights.data, d_weights.dtype, i, 0.0f);
  }
  with_constant<kActivationFunctions>(activation.function, [&]<ActivationFunction F>() {
    with_element_type(in.pre.dtype, [&]<typename T>(T*) {
      const auto row_backward = [&](std::int64_t r, std::int64_t expert) {
        const std::int64_t flat = flat_row(routing, r, flat_rows);
        if (flat < 0) {
          zero_row(out.d_pre, r);
          zero_row(out.weighted_act, r);
          return;
        }
        const float weight = router_weight(routing, flat);
        double sum = backward_row<F, T>(in, activation, out, r, expert, weight);
        if (!d_weights.given()) return;
        if (in.down_bias.given()) {
          sum += dot(row_of<const T>(in.d_out, flat / routing.topk),
                     row_of<const T>(in.down_bias, expert), in.d_out.shape[1]);
        }
        write_float(d_weights.data, d_weights.dtype, flat, static_cast<float>(sum));
      };
      for_each_row_of_experts(context, routing, rows, in.d_act.shape[1],
                              {&out.d_pre, &out.weighted_act}, row_backward);
    });
  });
}

void CpuPasses::add_to_rows(const TensorView& rows, const TensorView& added,
                            const RoutingView& routing, const TensorView& out,
                            const ExecutionContext& context) const {
  const bool per_row = !routing.router_weights.given();
  const std::int64_t columns = out.shape[1];
  with_element_type(rows.dtype, [&]<typename In>(In*) {
    with_element_type(out.dtype, [&]<typename Out>(Out*) {
      const auto add_to_row = [&](std::int64_t r, std::int64_t expert) {
        const float weight = router_weight(routing, r);
        const In* from = row_of<const In>(rows, r);
        const std::int64_t first = (per_row ? r : expert) * added.row_stride;
        Out* to = row_of<Out>(out, r);
        for (std::int64_t c = 0; c < columns; ++c) {
          const float term = read_float(added.data, added.dtype, first + c);
          store(to_float(from[c]) + weight * term, to[c]);
        }
      };
      for_each_row_of_experts(context, routing, out.shape[0], columns, {&out}, add_to_row);
    });
  });
}

}  // namespace moegemm::cpu
