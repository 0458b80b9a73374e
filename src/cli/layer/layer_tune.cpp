#include "layer/layer_tune.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <new>
#include <utility>

#include "layer/tensors/device_tensor.h"
#include "layer/tensors/lent_memory.h"
#include "layer/tensors/random_tensor.h"
#include "moegemm/error.h"
#include "moegemm/ops.h"
#include "testing/device/memory.h"

namespace moegemm::cli {
namespace {

/// Random values that repeat: a product's speed depends on the data being random (zeros draw less
/// power), not on it being all different, and a large layer has billions of weights.
void fill_repeating(testing::Memory& memory, const DeviceTensor& tensor, std::uint64_t seed) {
  constexpr std::int64_t kPeriod = 1 << 22;
  const DType dtype = tensor.view.dtype;
  const std::int64_t count = tensor.view.numel();
  const RandomTensor values(seed, dtype, 0.1F);
  std::vector<std::byte> period(
      static_cast<std::size_t>(std::min(count, kPeriod) * size_bytes(dtype)));
  for (std::int64_t i = 0; i < std::min(count, kPeriod); ++i) {
    store_element(period.data(), dtype, i, values.at(i));
  }
  for (std::int64_t begin = 0; begin < count; begin += kPeriod) {
    memory.copy_in(static_cast<std::byte*>(tensor.view.data) + begin * size_bytes(dtype),
                   period.data(), std::min(kPeriod, count - begin) * size_bytes(dtype));
  }
}

/// Lends memory of the program to one measurement.
class LayerSupport final : public TuningSupport {
 public:
  LayerSupport(testing::Memory& memory, const std::string& op, const LayerTuning& tuning)
      : memory_(memory), op_(op), tuning_(tuning) {
    budget_seconds = tuning.budget_seconds;
  }

  void* allocate(std::int64_t bytes, Device) override {
    try {
      buffers_.emplace_back(memory_, static_cast<std::size_t>(bytes));
    } catch (const Error&) {
      return nullptr;
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
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
    m_sizes_ = upload(memory, DType::kInt32, routing.m_sizes);
    gather_indices_ = upload(memory, DType::kInt32, routing.gather_indices);
    weights_ = upload(memory, DType::kFloat32, routing.weights);
  }

  std::vector<TunedProduct> run() {
    for (const LayerGemm gemm : {LayerGemm::kFirst, LayerGemm::kSecond}) {
      if (!interrupted_) tune_gemm(gemm);
    }
    return std::move(products_);
  }

 private:
  DeviceTensor random_matrix(std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
    DeviceTensor tensor = make_matrix(memory_, spec_.dtype, rows, cols);
    fill_repeating(memory_, tensor, spec_.seed * 16 + seed);
    return tensor;
  }

  void tune_gemm(LayerGemm gemm) {
    const bool first = gemm == LayerGemm::kFirst;
    const std::int64_t n = first ? 2 * spec_.intermediate : spec_.hidden;
    const std::int64_t k = first ? spec_.hidden : spec_.intermediate;
    const RoutingView routing = {m_sizes_.view, gather_indices_.view, weights_.view, spec_.topk};
    GemmOptions options;
    options.permute_x = first;
    options.permute_y = !first;
    options.backend = spec_.backend;
    GemmOptions forward_options = options;
    forward_options.multiply = !first;
    const char* number = first ? " 1" : " 2";

    const DeviceTensor x = random_matrix(first ? spec_.tokens : spec_.rows(), k, 1);
    const DeviceTensor dy = random_matrix(spec_.rows(), n, 2);
    {
      const DeviceTensor w = make_stack(memory_, spec_.dtype, spec_.experts, n, k);
      fill_repeating(memory_, w, spec_.seed * 16 + 3);
      tune(std::string("forward") + number, [&](const ExecutionContext& context) {
        const DeviceTensor y = make_matrix(memory_, spec_.dtype, spec_.rows(), n);
        return tune_forward(x.view, w.view, y.view, routing, forward_options, context,
                            tuning_.again);
      });
      tune(std::string("dX") + number, [&](const ExecutionContext& context) {
        const DeviceTensor dx = make_matrix(memory_, spec_.dtype, spec_.rows(), k);
        return tune_dx(dy.view, w.view, dx.view, routing, options, context, tuning_.again);
      });
    }
    tune(std::string("dW") + number, [&](const ExecutionContext& context) {
      const DeviceTensor dw = make_stack(memory_, spec_.dtype, spec_.experts, n, k);
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
    LentMemory workspace(memory_);
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
