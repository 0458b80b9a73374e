#include "layer/layer_run.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "layer/random_weights.h"
#include "moegemm/passes.h"
#include "output/progress.h"
#include "testing/device/device_tensor.h"
#include "testing/numerics/floats.h"
#include "testing/numerics/weight_formats.h"

namespace moegemm::cli {
namespace {

// Rows of each output that the oracle recomputes.
constexpr std::int64_t kSampledRows = 16;

using Tensor = testing::DeviceTensor;
/// The row of an operand that belongs to an expert-ordered row.
using RowMap = std::function<std::int64_t(std::int64_t)>;

/// Runs the operations of one layer and remembers what they reported.
class Layer {
 public:
  Layer(const LayerSpec& spec, testing::Memory& memory, Progress& progress)
      : spec_(spec),
        memory_(memory),
        progress_(progress),
        workspace_(memory, false),
        host_(make_routing(spec.pattern, spec.tokens, spec.topk, spec.experts, spec.seed)),
        expert_ids_(testing::upload(memory, DType::kInt32, host_.expert_ids)),
        weights_(testing::upload(memory, DType::kFloat32, host_.weights)),
        m_sizes_(testing::upload(memory, DType::kInt32, host_.m_sizes)),
        gather_indices_(testing::upload(memory, DType::kInt32, host_.gather_indices)) {}

  std::vector<OpReport> run() {
    route_tokens();
    run_gemm(LayerGemm::kFirst);
    run_gemm(LayerGemm::kSecond);
    return std::move(reports_);
  }

 private:
  /// Variance 1 / fan_in keeps every product's outputs near 1, far from the ends of fp16.
  static float amplitude(std::int64_t fan_in) {
    return static_cast<float>(std::sqrt(3.0 / static_cast<double>(fan_in)));
  }
  RandomTensor random(std::uint64_t stream, std::int64_t fan_in) const {
    return {spec_.seed * 16 + stream, spec_.dtype, amplitude(fan_in)};
  }

  Tensor random_matrix(const RandomTensor& values, std::int64_t rows, std::int64_t cols) {
    Tensor tensor = testing::make_matrix(memory_, values.dtype(), rows, cols);
    fill("random rows", values, tensor);
    return tensor;
  }

  LayerWeights make_weights(const RandomWeights& values) {
    return values.make(
        memory_, [&](int chunk, int chunks) { progress_.phase("random weights", chunk, chunks); });
  }

  void fill(const char* what, const RandomTensor& values, const Tensor& tensor) {
    values.fill(memory_, tensor.buffer.data(), tensor.view.numel(),
                [&](int chunk, int chunks) { progress_.phase(what, chunk, chunks); });
  }

  RoutingView routing() const {
    return {m_sizes_.view, gather_indices_.view, weights_.view, spec_.topk};
  }

  ExecutionContext context() {
    ExecutionContext context;
    context.memory = &workspace_;
    return context;
  }

  /// Poisons `outputs`, runs once to warm up and `repeat` times for the clock.
  OpReport& measure(const std::string& op, std::initializer_list<const Tensor*> outputs,
                    const std::function<std::optional<Plan>()>& work) {
    progress_.step(op);
    for (const Tensor* output : outputs) {
      memory_.fill(output->buffer.data(), testing::kPoisonByte, output->buffer.bytes());
    }
    OpReport report;
    report.op = op;
    report.plan = work();
    std::vector<double> times;
    for (int i = 0; i < spec_.repeat; ++i) {
      progress_.phase(op + ", run", i + 1, spec_.repeat);
      times.push_back(memory_.milliseconds([&] { work(); }));
    }
    progress_.phase(op + ", check", 1, 1);
    std::sort(times.begin(), times.end());
    report.median_ms = times[times.size() / 2];
    report.best_ms = times.front();
    reports_.push_back(std::move(report));
    return reports_.back();
  }

  /// The same for a matrix product.
  OpReport& measure(const std::string& op, const Problem& problem, const Tensor& output,
                    const std::function<Plan()>& work) {
    OpReport& report = measure(op, {&output}, work);
    report.flops = problem.flops();
    return report;
  }

  std::int64_t flat(std::int64_t row) const {
    return host_.gather_indices[static_cast<std::size_t>(row)];
  }
  std::int64_t expert(std::int64_t row) const {
    return host_.expert_of_row[static_cast<std::size_t>(row)];
  }
  double weight(std::int64_t flat_row) const {
    return host_.weights[static_cast<std::size_t>(flat_row)];
  }

  /// Elements [row, 0..cols) of a random matrix.
  static std::vector<double> row_of(const RandomTensor& values, std::int64_t row,
                                    std::int64_t cols) {
    std::vector<double> elements(static_cast<std::size_t>(cols));
    for (std::int64_t c = 0; c < cols; ++c) {
      elements[static_cast<std::size_t>(c)] = values.at(row * cols + c);
    }
    return elements;
  }

  /// Rows of Y = X W^T or dX = dY W: `source_row` is that of X or dY.
  void check_row_gemm(OpReport& report, const Problem& problem, const Tensor& out,
                      const RandomTensor& sources, const RandomWeights& w, const RowMap& source_row,
                      const RowMap& out_row) {
    const bool forward = problem.op == Op::kForward;
    const std::int64_t length = forward ? problem.k : problem.n;
    const std::int64_t col_step = forward ? problem.k : 1;
    const std::int64_t term_step = forward ? 1 : problem.k;
    std::vector<OracleRow> rows;
    for (const std::int64_t r : spread(spec_.rows(), kSampledRows)) {
      const std::int64_t first = expert(r) * problem.n * problem.k;
      rows.push_back({out_row(r), row_of(sources, source_row(r), length),
                      [=, &w](std::int64_t col, std::int64_t l) {
                        return double{w.at(first + col * col_step + l * term_step)};
                      },
                      problem.multiply ? weight(flat(r)) : 1.0});
    }
    report.check = check_products(memory_, out.view, rows, spec_.tolerance);
  }

  /// Rows of dW = dY^T X: `dy_row` maps an expert-ordered row, `x` gives its elements.
  void check_dw(OpReport& report, const Tensor& dw, const RandomTensor& dy, std::int64_t n,
                const RowMap& dy_row,
                const std::function<double(std::int64_t row, std::int64_t col)>& x) {
    std::vector<OracleRow> rows;
    for (const std::int64_t out_row : spread(spec_.experts * n, kSampledRows)) {
      const auto e = static_cast<std::size_t>(out_row / n);
      const std::int64_t begin = host_.segment_begin[e];
      std::vector<double> column;
      for (std::int64_t r = begin; r < host_.segment_begin[e + 1]; ++r) {
        column.push_back(dy.at(dy_row(r) * n + out_row % n));
      }
      rows.push_back({out_row, std::move(column),
                      [&x, begin](std::int64_t col, std::int64_t l) { return x(begin + l, col); }});
    }
    report.check = check_products(memory_, dw.view, rows, spec_.tolerance);
  }

  /// Rows of out[t] = sum of the topk rows of token t, read back from the device.
  void check_token_sums(OpReport& report, const Tensor& out, const Tensor& rows) {
    Comparison comparison(out.view.dtype, spec_.tolerance);
    for (const std::int64_t t : spread(spec_.tokens, kSampledRows)) {
      const std::vector<double> got = read_row(memory_, out.view, t);
      std::vector<double> sum(got.size(), 0.0);
      std::vector<double> squares(got.size(), 0.0);
      for (std::int64_t s = 0; s < spec_.topk; ++s) {
        const std::vector<double> row = read_row(memory_, rows.view, t * spec_.topk + s);
        for (std::size_t c = 0; c < row.size(); ++c) {
          sum[c] += row[c];
          squares[c] += row[c] * row[c];
        }
      }
      for (std::size_t c = 0; c < got.size(); ++c) {
        comparison.add(t, static_cast<std::int64_t>(c), got[c], sum[c], squares[c], spec_.topk);
      }
    }
    report.check = comparison.result();
  }

  void route_tokens() {
    const std::int64_t workspace_bytes =
        route_workspace_bytes(spec_.rows(), spec_.experts, memory_.device());
    const testing::Buffer workspace(memory_, static_cast<std::size_t>(workspace_bytes));
    const TensorView ids = TensorView::matrix(expert_ids_.buffer.data(), DType::kInt32,
                                              spec_.tokens, spec_.topk, 0, memory_.device());
    OpReport& report = measure("route", {&m_sizes_, &gather_indices_}, [&] {
      route(ids, spec_.experts, m_sizes_.view, gather_indices_.view, {}, workspace.data());
      return std::nullopt;
    });
    // Integers: every one of them, exactly.
    report.check.elements = m_sizes_.view.numel() + gather_indices_.view.numel();
    compare_integers(report.check, "m_sizes", m_sizes_, host_.m_sizes);
    compare_integers(report.check, "gather_indices", gather_indices_, host_.gather_indices);
  }

  void compare_integers(CheckResult& check, const char* name, const Tensor& tensor,
                        const std::vector<std::int32_t>& expected) {
    std::vector<std::int32_t> got(expected.size());
    memory_.copy_out(got.data(), tensor.buffer.data(), got.size() * sizeof(std::int32_t));
    const auto [wrong, right] = std::mismatch(got.begin(), got.end(), expected.begin());
    if (wrong == got.end() || !check.fault.empty()) return;
    check.error = 1;
    check.fault = std::string(name) + "[" + std::to_string(wrong - got.begin()) + "] is " +
                  std::to_string(*wrong) + ", expected " + std::to_string(*right);
  }

  /// Forward, dX and dW of one product, and the passes between them and the rest of the layer.
  void run_gemm(LayerGemm gemm) {
    const bool first = gemm == LayerGemm::kFirst;
    const Problem forward_problem = layer_problem(spec_, gemm, Op::kForward);
    const Problem dx_problem = layer_problem(spec_, gemm, Op::kDx);
    const Problem dw_problem = layer_problem(spec_, gemm, Op::kDw);
    const std::int64_t n = forward_problem.n;
    const std::int64_t k = forward_problem.k;
    const RowMap expert_order = [](std::int64_t r) { return r; };
    const RowMap flat_order = [this](std::int64_t r) { return flat(r); };
    const RowMap token_order = [this](std::int64_t r) { return flat(r) / spec_.topk; };
    const RowMap& x_row = first ? token_order : expert_order;
    const RowMap& y_row = first ? expert_order : flat_order;
    const RandomTensor x_values = random(first ? 0 : 3, 3);
    const RandomWeights w_values(random(first ? 1 : 4, k), amplitude(k),
                                 quantization_of(spec_, n, k), spec_.experts, n, k);
    const RandomTensor dy_values = random(first ? 2 : 5, n);

    const Tensor x = random_matrix(x_values, first ? spec_.tokens : spec_.rows(), k);
    Tensor dy;
    Tensor scaled_x;
    {
      const LayerWeights w = make_weights(w_values);
      {
        const Tensor y = testing::make_matrix(memory_, spec_.dtype, spec_.rows(), n);
        OpReport& report = measure(
            first ? "forward 1: gather" : "forward 2: multiply, scatter", forward_problem, y, [&] {
              return forward(x.view, w.view, y.view, routing(),
                             w.with(options_of(forward_problem, spec_)), context());
            });
        check_row_gemm(report, forward_problem, y, x_values, w_values, x_row, y_row);
        if (!first) sum_per_token("combine", y);
      }
      dy = random_matrix(dy_values, spec_.rows(), n);
      const Tensor dx = testing::make_matrix(memory_, spec_.dtype, spec_.rows(), k);
      OpReport& report = measure(first ? "dX 1: scatter" : "dX 2: gather", dx_problem, dx, [&] {
        return backward_dx(dy.view, w.view, dx.view, routing(),
                           w.with(options_of(dx_problem, spec_)), context());
      });
      check_row_gemm(report, dx_problem, dx, dy_values, w_values, y_row,
                     first ? flat_order : expert_order);
      if (first) {
        sum_per_token("sum dX 1", dx);
      } else {
        scaled_x = scale_by_weights(dx, x, x_values);
      }
    }
    if (spec_.weights != WeightFormat::kPlain) return;
    const Tensor dw = testing::make_stack(memory_, spec_.dtype, spec_.experts, n, k);
    OpReport& report = measure(first ? "dW 1: gather" : "dW 2: gather", dw_problem, dw, [&] {
      return backward_dw(dy.view, first ? x.view : scaled_x.view, dw.view, routing(),
                         options_of(dw_problem, spec_), context());
    });
    check_dw(report, dw, dy_values, n, y_row, [&](std::int64_t r, std::int64_t col) {
      const float element = x_values.at(x_row(r) * k + col);
      return double{first ? element : scaled(r, element)};
    });
  }

  void sum_per_token(const std::string& op, const Tensor& rows) {
    const Tensor out = testing::make_matrix(memory_, spec_.dtype, spec_.tokens, rows.view.shape[1]);
    OpReport& report = measure(op, {&out}, [&] {
      combine(rows.view, {}, spec_.topk, out.view);
      return std::nullopt;
    });
    check_token_sums(report, out, rows);
  }

  /// The row's weight times an element of x, rounded once to x's type.
  float scaled(std::int64_t row, float x_element) const {
    return testing::round_to(spec_.dtype, static_cast<float>(weight(flat(row))) * x_element);
  }

  /// The gradient of the fused multiply: per row a dot product and two scaled copies. Returns x
  /// times the weights.
  Tensor scale_by_weights(const Tensor& product, const Tensor& x, const RandomTensor& x_values) {
    const std::int64_t k = spec_.intermediate;
    const Tensor scaled = testing::make_matrix(memory_, spec_.dtype, spec_.rows(), k);
    Tensor scaled_x = testing::make_matrix(memory_, spec_.dtype, spec_.rows(), k);
    const Tensor dot = testing::make_vector(memory_, DType::kFloat32, spec_.rows());
    OpReport& report = measure("scale rows", {&scaled, &dot, &scaled_x}, [&] {
      scale_rows(product.view, x.view, routing(), scaled.view, dot.view, scaled_x.view);
      return std::nullopt;
    });

    Comparison scaled_comparison(spec_.dtype, spec_.tolerance);
    Comparison dot_comparison(DType::kFloat32, std::nullopt);
    std::vector<float> dots(static_cast<std::size_t>(spec_.rows()));
    memory_.copy_out(dots.data(), dot.buffer.data(), dot.buffer.bytes());
    for (const std::int64_t r : spread(spec_.rows(), kSampledRows)) {
      const std::vector<double> product_row = read_row(memory_, product.view, r);
      const std::vector<double> scaled_row = read_row(memory_, scaled.view, r);
      const std::vector<double> scaled_x_row = read_row(memory_, scaled_x.view, r);
      double sum = 0;
      double squares = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        const auto i = static_cast<std::size_t>(c);
        const double x_element = x_values.at(r * k + c);
        const double term = product_row[i] * x_element;
        sum += term;
        squares += term * term;
        const double w = weight(flat(r));
        scaled_comparison.add(r, c, scaled_row[i], w * product_row[i], 0, 1);
        scaled_comparison.add(r, c, scaled_x_row[i], w * x_element, 0, 1);
      }
      dot_comparison.add(flat(r), 0, dots[static_cast<std::size_t>(flat(r))], sum, squares, k);
    }
    report.check = scaled_comparison.result();
    const CheckResult dot_check = dot_comparison.result();
    report.check.elements += dot_check.elements;
    if (report.check.passed() && !dot_check.passed()) {
      report.check.fault = "dot: " + dot_check.fault;
    }
    return scaled_x;
  }

  const LayerSpec& spec_;
  testing::Memory& memory_;
  Progress& progress_;
  testing::BorrowedMemory workspace_;
  TokenRouting host_;
  Tensor expert_ids_;
  Tensor weights_;
  Tensor m_sizes_;
  Tensor gather_indices_;
  std::vector<OpReport> reports_;
};

}  // namespace

Quantization quantization_of(const LayerSpec& spec, std::int64_t n, std::int64_t k) {
  if (spec.weights == WeightFormat::kPlain) return {};
  const testing::MadeFormat& made = testing::made_format(spec.weights);
  return parse_quantization(made.text, made.scale_type, n, k);
}

std::vector<Op> trained_ops(const LayerSpec& spec) {
  if (spec.weights != WeightFormat::kPlain) return {Op::kForward, Op::kDx};
  return {Op::kForward, Op::kDx, Op::kDw};
}

Problem layer_problem(const LayerSpec& spec, LayerGemm gemm, Op op) {
  const bool first = gemm == LayerGemm::kFirst;
  Problem problem;
  problem.op = op;
  problem.dtype = spec.dtype;
  problem.out_dtype = spec.dtype;
  problem.experts = spec.experts;
  problem.n = first ? 2 * spec.intermediate : spec.hidden;
  problem.k = first ? spec.hidden : spec.intermediate;
  problem.rows = spec.rows();
  problem.topk = spec.topk;
  problem.permutation = first ? Permutation::kX : Permutation::kY;
  problem.multiply = !first && op == Op::kForward;
  problem.device = spec.device;
  // Dense rows in an aligned allocation: what divides the row pitches is all that matters.
  const auto alignment = [&](std::int64_t cols) {
    const std::int64_t bytes = cols * size_bytes(spec.dtype);
    return static_cast<int>(std::min<std::int64_t>(16, bytes & -bytes));
  };
  const int n_alignment = alignment(problem.n);
  const int k_alignment = alignment(problem.k);
  problem.input_alignment = op == Op::kForward ? k_alignment : std::min(n_alignment, k_alignment);
  problem.output_alignment = op == Op::kForward ? n_alignment : k_alignment;
  if (spec.weights == WeightFormat::kPlain || op == Op::kDw) return problem;
  problem.quantization = quantization_of(spec, problem.n, problem.k);
  problem.input_alignment = op == Op::kForward ? k_alignment : n_alignment;
  const auto byte_alignment = [](std::int64_t bytes) {
    return static_cast<int>(std::min<std::int64_t>(16, bytes & -bytes));
  };
  const Quantization& q = problem.quantization;
  const std::int64_t row_bits = problem.k * q.bits();
  problem.packed_alignment = row_bits % 8 == 0 ? byte_alignment(row_bits / 8) : 1;
  problem.scales_alignment =
      byte_alignment(q.scale_columns(problem.n, problem.k) * scale_bytes(q.scale_type));
  return problem;
}

GemmOptions options_of(const Problem& problem, const LayerSpec& spec) {
  GemmOptions options;
  options.permute_x = problem.permutation == Permutation::kX;
  options.permute_y = problem.permutation == Permutation::kY;
  options.multiply = problem.multiply;
  options.backend = spec.backend;
  return options;
}

double layer_bytes(const LayerSpec& spec) {
  const auto hidden = static_cast<double>(spec.hidden);
  const auto intermediate = static_cast<double>(spec.intermediate);
  const auto rows = static_cast<double>(spec.rows());
  const double weights = static_cast<double>(spec.experts) * hidden * intermediate;
  const double wide = std::max(2 * intermediate, hidden);
  // The larger of the two products at a time: its weights or their gradient, and at most four
  // matrices of M rows.
  const double elements =
      2 * weights + rows * 4 * wide + 2 * static_cast<double>(spec.tokens) * hidden;
  return elements * static_cast<double>(size_bytes(spec.dtype)) + rows * 64;
}

std::vector<OpReport> run_layer(const LayerSpec& spec, testing::Memory& memory,
                                Progress& progress) {
  return Layer(spec, memory, progress).run();
}

}  // namespace moegemm::cli
