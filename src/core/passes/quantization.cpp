#include "core/refusal.h"
#include "core/registry.h"
#include "core/validation/quantization_rules.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/passes.h"

namespace moegemm {

void dequantise_weights(const TensorView& packed_view, const ScalesView& scales_view,
                        const Quantization& quantization, const TensorView& out_view,
                        const ExecutionContext& context) {
  const Argument packed{"packed", packed_view};
  const ScalesArgument scales{"scales", scales_view};
  const Argument out{"out", out_view};
  require_form(packed, {{3, "[E, N, K]"}});
  require_form(out, {{3, "[E, N, K]"}});
  require_floating(out);
  require_same_dtype(packed, out);
  require_same_device(out, packed);
  const auto [experts, n, k] = packed_view.shape;
  require_shape(out, {experts, n, k}, "[E, N, K]");
  require_extent(packed, n, "N");
  require_extent(packed, k, "K");
  if (quantization.plain()) refuse_value("quantization is plain; there is nothing to decode");
  require_given(scales, quantization, CallerWords{}.none);
  require_blocks(quantization, packed.name, scales.name, n, k);
  require_scales(scales, quantization, experts, n, k, packed_view.device);
  require_memory(packed);
  require_memory(out);
  if (out_view.row_stride != k) {
    refuse_value("out has row_stride ", out_view.row_stride, "; it must be dense: K = ", k);
  }
  require_packed_memory(packed, scales, quantization, n, k, out);
  passes_for(out_view.device)
      .dequantise(packed_view, scales_view.data, quantization, 0, 0, out_view, context);
}

}  // namespace moegemm
