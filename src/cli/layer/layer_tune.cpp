#include "layer/layer_tune.h"

#include <list>
#include <utility>

#include "layer/random_weights.h"
#include "testing/device/device_tensor.h"

namespace moegemm::cli {
namespace {

using testing::DeviceTensor;

/// Lends memory of the program to one measurement.
class LayerSupport final : public TuningSupport {
 public:
  LayerSupport(testing::Memory& memory, const std::string& op, const LayerTuning& tuning)
      : memory_(memory), op_(op), tuning_(tuning) {
    budget_seconds = tuning.budget_seconds;
  }

  void* allocate(std::int64_t bytes, Device) override {
    buffers_.push_back(testing::Buffer::if_possible(memory_, static_cast<std::size_t>(bytes)));
    return buffers_.back().data();
  }

  bool progress(const TuneProgress& now) override {
    return !tuning_.progress || tuning_.progress(op_, now);
  }

 private:
  testing::Memory& memory_;
  const std::string& op_;
  const LayerTuning& tuning_;
  std::list<testing::Buffer> buffers_;
};

class LayerTuner {
 public:
  LayerTuner(const LayerSpec& spec, testing::Memory& memory, const LayerTuning& tuning)
      : spec_(spec), memory_(memory), tuning_(tuning) {
    const TokenRouting routing =
        make_routing(spec.pattern, spec.tokens, spec.topk, spec.experts, spec.seed);
    m_sizes_ = testing::upload(memory, DType::kInt32, routing.m_sizes);
    gather_indices_ = testing::upload(memory, DType::kInt32, routing.gather_indices);
    weights_ = testing::upload(memory, DType::kFloat32, routing.weights);
  }

  std::vector<TunedProduct> run() {
    for (const LayerGemm gemm : {LayerGemm::kFirst, LayerGemm::kSecond}) {
      if (!interrupted_) tune_gemm(gemm);
    }
    return std::move(products_);
  }

 private:
  DeviceTensor filled(DeviceTensor tensor, std::uint64_t seed) {
    RandomTensor(spec_.seed * 16 + seed, spec_.dtype, 0.1F)
        .fill_repeating(memory_, tensor.view.data, tensor.view.numel());
    return tensor;
  }
  DeviceTensor matrix(std::int64_t rows, std::int64_t cols) {
    return testing::make_matrix(memory_, spec_.dtype, rows, cols);
  }
  DeviceTensor stack(std::int64_t rows, std::int64_t cols) {
    return testing::make_stack(memory_, spec_.dtype, spec_.experts, rows, cols);
  }

  LayerWeights weights(std::int64_t n, std::int64_t k) {
    const Quantization quantization = quantization_of(spec_, n, k);
    if (!quantization.plain()) {
      const RandomTensor values(spec_.seed * 16 + 3, spec_.dtype, 0.1F);
      return RandomWeights(values, 0.1F, quantization, spec_.experts, n, k).make(memory_);
    }
    DeviceTensor plain = filled(stack(n, k), 3);
    LayerWeights weights;
    weights.values = std::move(plain.buffer);
    weights.view = plain.view;
    return weights;
  }

  void tune_gemm(LayerGemm gemm) {
    const bool first = gemm == LayerGemm::kFirst;
    const Problem problem = layer_problem(spec_, gemm, Op::kForward);
    const std::int64_t n = problem.n;
    const std::int64_t k = problem.k;
    const RoutingView routing = {m_sizes_.view, gather_indices_.view, weights_.view, spec_.topk};
    const GemmOptions forward_options = options_of(problem, spec_);
    const GemmOptions options = options_of(layer_problem(spec_, gemm, Op::kDx), spec_);
    const std::string number = first ? " 1" : " 2";

    const DeviceTensor x = filled(matrix(first ? spec_.tokens : spec_.rows(), k), 1);
    const DeviceTensor dy = filled(matrix(spec_.rows(), n), 2);
    {
      const LayerWeights w = weights(n, k);
      tune("forward" + number, [&](const ExecutionContext& context) {
        const DeviceTensor y = matrix(spec_.rows(), n);
        return tune_forward(x.view, w.view, y.view, routing, w.with(forward_options), context,
                            tuning_.again);
      });
      tune("dX" + number, [&](const ExecutionContext& context) {
        const DeviceTensor dx = matrix(spec_.rows(), k);
        return tune_dx(dy.view, w.view, dx.view, routing, w.with(options), context, tuning_.again);
      });
    }
    if (spec_.weights != WeightFormat::kPlain) return;
    tune("dW" + number, [&](const ExecutionContext& context) {
      const DeviceTensor dw = stack(n, k);
      return tune_dw(dy.view, x.view, dw.view, routing, options, context, tuning_.again);
    });
  }

  void tune(const std::string& op,
            const std::function<TuneReport(const ExecutionContext&)>& measure) {
    if (interrupted_) return;
    LayerSupport support(memory_, op, tuning_);
    ExecutionContext context;
    context.tuning = &support;
    // Nothing is lent from here: it says that calls will have a workspace, which the support lends.
    testing::BorrowedMemory workspace(memory_);
    context.memory = &workspace;
    products_.push_back({op, measure(context)});
    interrupted_ = products_.back().report.interrupted;
  }

  const LayerSpec& spec_;
  testing::Memory& memory_;
  const LayerTuning& tuning_;
  DeviceTensor m_sizes_;
  DeviceTensor gather_indices_;
  DeviceTensor weights_;
  std::vector<TunedProduct> products_;
  bool interrupted_ = false;
};

}  // namespace

std::vector<TunedProduct> tune_layer(const LayerSpec& spec, testing::Memory& memory,
                                     const LayerTuning& tuning) {
  return LayerTuner(spec, memory, tuning).run();
}

double tuning_bytes(const LayerSpec& spec) {
  // A second gradient for the timed launches, and 256 MiB that flush the largest of caches.
  const double weights = static_cast<double>(spec.experts) * static_cast<double>(spec.hidden) * 2 *
                         static_cast<double>(spec.intermediate);
  return layer_bytes(spec) + weights * static_cast<double>(size_bytes(spec.dtype)) + (256 << 20);
}

}  // namespace moegemm::cli
