#include "dtypes.h"
#include "moegemm/passes.h"
#include "packed_weight.h"
#include "registration.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

using torch::headeronly::ScalarType;

DType decoded_dtype(ScalarType dtype) {
  const std::optional<DType> known = library_dtype(static_cast<std::int32_t>(dtype));
  if (!known || !is_floating(*known)) {
    refuse_type("dtype is ", torch::headeronly::toString(dtype), "; accepted are ",
                names_of(kFloatingFormats));
  }
  return *known;
}

/// See moegemm::dequantise_weights; the arguments are those of packed_weight.h.
Tensor dequantize(const Tensor& w, const Tensor& scales, const std::string& w_format,
                  ScalarType dtype) {
  return raising([&] {
    PackedWeight packed("w", w.get(), "scales", scales.get(), w_format, decoded_dtype(dtype));
    const TensorView& view = packed.view();
    Output out = allocate(3, view.shape, view.dtype, view.device);
    packed.read();
    // Each element takes about ten operations.
    const Execution execution(view.device, 10.0 * static_cast<double>(view.numel()));
    moegemm::dequantise_weights(packed.view(), packed.scales(), packed.quantization(), out.view,
                                execution.context());
    return out.hand_over();
  });
}

constexpr Operator kOperators[] = {
    {"dequantize(Tensor w, Tensor scales, str w_format, ScalarType dtype) -> Tensor",
     TORCH_BOX(&dequantize)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)

}  // namespace moegemm::torch_ops
