#include "core/validation/quantization_rules.h"

#include <algorithm>
#include <array>
#include <bit>

#include "core/refusal.h"
#include "core/types/names.h"

namespace moegemm {
namespace {

void require_scale_type(const Quantization& quantization, const char* scales_name,
                        std::initializer_list<ScaleType> accepted) {
  if (std::find(accepted.begin(), accepted.end(), quantization.scale_type) != accepted.end()) {
    return;
  }
  std::string names;
  for (const ScaleType type : accepted)
    names += join(names.empty() ? "" : " and ", to_string(type));
  refuse_type(scales_name, " are ", to_string(quantization.scale_type), "; accepted are ", names,
              " with ", to_string(quantization.format));
}

void require_block(const Quantization& quantization, bool accepted, const char* rule) {
  if (accepted) return;
  refuse_value("the blocks of ", to_string(quantization.format), " are ", quantization.block_n,
               " x ", quantization.block_k, "; accepted are ", rule);
}

void require_whole_groups(const Quantization& quantization, const char* name, std::int64_t k) {
  if (k % quantization.block_k != 0) {
    refuse_value(name, " has K = ", k, "; with ", to_string(quantization.format),
                 " it must be a multiple of the group of ", quantization.block_k);
  }
}

/// [E, rows, columns] without the ones at its end, or all of it.
struct ScalesShape {
  std::array<std::int64_t, 3> sizes;
  int least_rank;
  int most_rank;
};

ScalesShape scales_shape(const Quantization& q, std::int64_t experts, std::int64_t n,
                         std::int64_t k) {
  if (q.format == WeightFormat::kNf4) return {{experts, q.scale_columns(n, k), 1}, 2, 2};
  ScalesShape shape = {{experts, q.scale_rows(n), q.scale_columns(n, k)}, 3, 3};
  while (shape.least_rank > 1 && shape.sizes[shape.least_rank - 1] == 1) --shape.least_rank;
  return shape;
}

std::int64_t count_of(const ScalesView& scales) {
  std::int64_t count = 1;
  for (int i = 0; i < scales.rank; ++i) count *= scales.shape[i];
  return count;
}

/// As many bytes from there, as a tensor.
TensorView bytes_at(const void* data, std::int64_t bytes) {
  return TensorView::vector(data, DType::kFloat16, (bytes + 1) / 2);
}

int alignment_of(const void* data, std::int64_t pitch_bytes) {
  const std::uint64_t bits =
      reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(pitch_bytes) | 16u;
  return 1 << std::countr_zero(bits);
}

}  // namespace

void validate_quantized_op(const Problem& problem, const CallerWords& words) {
  if (problem.op == Op::kDw) {
    refuse_value(words.w, " is quantised (", to_string(problem.quantization),
                 ") for dW; a quantised W is frozen, only forward and dX read it");
  }
  if (problem.weight_layout != WeightLayout::kNk) {
    refuse_value(words.w, " is quantised (", to_string(problem.quantization),
                 ") as [E, K, N]; it must be [E, N, K], formats run along K");
  }
}

void require_given(const ScalesArgument& scales, const Quantization& quantization,
                   const char* none) {
  if (scales.view.given()) return;
  refuse_value(scales.name, " is ", none, "; ", to_string(quantization.format), " needs it");
}

void require_blocks(const Quantization& quantization, const char* name, const char* scales_name,
                    std::int64_t n, std::int64_t k) {
  const std::int64_t block_n = quantization.block_n;
  const std::int64_t block_k = quantization.block_k;
  switch (quantization.format) {
    case WeightFormat::kPlain:
      return;
    case WeightFormat::kMxfp4:
      require_block(quantization, block_n == 1 && block_k == 32, "1 x 32");
      require_scale_type(quantization, scales_name, {ScaleType::kE8m0});
      return require_whole_groups(quantization, name, k);
    case WeightFormat::kFp8:
      return require_block(
          quantization,
          (block_n == 128 && block_k == 128) || ((block_n == 1 || block_n == n) && block_k == k),
          "128 x 128, 1 x K and N x K");
    case WeightFormat::kInt4:
      require_block(quantization,
                    block_n == 1 && (block_k == 32 || block_k == 64 || block_k == 128),
                    "1 x 32, 1 x 64 and 1 x 128");
      require_scale_type(quantization, scales_name, {ScaleType::kBFloat16, ScaleType::kFloat16});
      return require_whole_groups(quantization, name, k);
    case WeightFormat::kNf4:
      require_block(quantization,
                    block_n == 1 && block_k >= 32 && block_k <= 4096 &&
                        std::has_single_bit(static_cast<std::uint64_t>(block_k)),
                    "1 x a power of two from 32 to 4096");
      require_scale_type(quantization, scales_name, {ScaleType::kFloat32});
      return;
  }
}

void require_scales(const ScalesArgument& scales, const Quantization& quantization,
                    std::int64_t experts, std::int64_t n, std::int64_t k, Device device) {
  const ScalesView& view = scales.view;
  if (view.type != quantization.scale_type) {
    refuse_type(scales.name, " has dtype ", to_string(view.type), "; the format says ",
                to_string(quantization.scale_type));
  }
  if (view.device != device) {
    refuse_type(scales.name, " is on ", to_string(view.device), "; it must be on ",
                to_string(device), ", where W is");
  }
  const ScalesShape shape = scales_shape(quantization, experts, n, k);
  if (view.rank >= shape.least_rank && view.rank <= shape.most_rank &&
      std::equal(view.shape.begin(), view.shape.begin() + view.rank, shape.sizes.begin())) {
    return;
  }
  std::string expected;
  for (int i = 0; i < shape.most_rank; ++i) {
    expected += join(expected.empty() ? "[" : ", ", shape.sizes[i]);
  }
  refuse_value(scales.name, " is ", to_string(view), "; its shape must be ", expected, "] with ",
               to_string(quantization), " and a W of [", experts, ", ", n, ", ", k, "]");
}

void require_packed_memory(const Argument& w, const ScalesArgument& scales,
                           const Quantization& quantization, std::int64_t n, std::int64_t k,
                           const Argument& out) {
  const ScalesView& view = scales.view;
  const std::int64_t rows = w.view.numel() / k;
  if (rows > 1 && w.view.row_stride != k) {
    refuse_value(w.name, " has row_stride ", w.view.row_stride,
                 "; packed values must be dense: row_stride = K = ", k);
  }
  if (count_of(view) > 0 && view.data == nullptr && view.device.type != DeviceType::kMeta) {
    refuse_value(scales.name, " is ", to_string(view), " with a null data pointer");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % static_cast<std::uintptr_t>(scale_bytes(view.type)) != 0) {
    refuse_value(scales.name, " begins at an address that is not a multiple of ",
                 scale_bytes(view.type), ", the bytes of ", to_string(view.type));
  }
  const TensorView values = bytes_at(w.view.data, rows / n * quantization.expert_bytes(n, k));
  const TensorView factors = bytes_at(view.data, count_of(view) * scale_bytes(view.type));
  require_disjoint(out, Argument{w.name, values});
  require_disjoint(out, Argument{scales.name, factors});
}

int packed_alignment(const TensorView& w, const Quantization& quantization) {
  const std::int64_t row_bits = w.shape[w.rank - 1] * quantization.bits();
  return row_bits % 8 != 0 ? 1 : alignment_of(w.data, row_bits / 8);
}

int scales_alignment(const ScalesView& scales, const Quantization& quantization, std::int64_t n,
                     std::int64_t k) {
  return alignment_of(scales.data,
                      quantization.scale_columns(n, k) * scale_bytes(quantization.scale_type));
}

}  // namespace moegemm
