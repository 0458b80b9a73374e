#include "packed_weight.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "dtypes.h"

namespace moegemm::torch_ops {
namespace {

WeightFormat format_named(const std::string& format) {
  const std::string_view name = std::string_view(format).substr(0, format.find('/'));
  for (const WeightFormatInfo& info : kWeightFormats) {
    if (name == info.name) return info.value;
  }
  return WeightFormat::kPlain;  // refused by parse_quantization
}

struct PackedElements {
  const char* dtypes;
  const char* letters;
  std::int64_t values;  ///< in each element
};

PackedElements elements_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8:
      return {"float8_e4m3fn and uint8", "[E, N, K]", 1};
    case WeightFormat::kInt4:
      return {"int32", "[E, N, K / 8]", 8};
    default:
      return {"uint8", "[E, N, K / 2]", 2};
  }
}

bool has_packed_dtype(WeightFormat format, std::int32_t number) {
  switch (format) {
    case WeightFormat::kFp8:
      return number == numbers().e4m3 || number == numbers().uint8;
    case WeightFormat::kInt4:
      return number == numbers().int32;
    default:
      return number == numbers().uint8;
  }
}

/// "nf4/64/5x33": the shape after the second slash, which is cut off.
std::optional<std::array<std::int64_t, 2>> cut_shape(std::string& format) {
  const std::size_t slash = format.find('/', format.find('/') + 1);
  if (format.find('/') == std::string::npos || slash == std::string::npos) return std::nullopt;
  std::array<std::int64_t, 2> shape = {};
  const char* at = format.data() + slash + 1;
  const char* const end = format.data() + format.size();
  const auto rows = std::from_chars(at, end, shape[0]);
  const bool times = rows.ec == std::errc{} && rows.ptr != end && *rows.ptr == 'x';
  const auto columns = std::from_chars(times ? rows.ptr + 1 : end, end, shape[1]);
  if (!times || columns.ec != std::errc{} || columns.ptr != end || shape[0] < 1 || shape[1] < 1) {
    refuse_value("w_format is '", format, "'; after the block it may have a shape, as in 5x33");
  }
  format.resize(slash);
  return shape;
}

/// The shape of W, of packed values in a tensor of `packed`'s shape.
TensorView decoded_view(const char* name, AtenTensorHandle tensor, std::string& format,
                        DType dtype) {
  const WeightFormat kind = format_named(format);
  const PackedElements elements = elements_of(kind);
  const Extents extents(name, tensor);
  TensorView view;
  view.rank = extents.rank;
  view.shape = extents.shape;
  view.device = extents.device;
  if (!has_packed_dtype(kind, dtype_number(tensor))) {
    refuse_type(name, " has dtype ", dtype_name(tensor), "; accepted with ", format, " are ",
                elements.dtypes);
  }
  const auto flat = kind == WeightFormat::kNf4 ? cut_shape(format) : std::nullopt;
  if (flat && view.rank == 2) {
    const auto [n, k] = *flat;
    if (view.shape[1] != (n * k + 1) / 2) {
      refuse_value(name, " has ", view.shape[1], " bytes for each expert; ", n, " x ", k,
                   " values take ", (n * k + 1) / 2);
    }
    view.rank = 3;
    view.shape = {view.shape[0], n, k};
  } else if (view.rank != 3) {
    refuse_value(name, " has ", view.rank, " dimensions; its shape must be ", elements.letters,
                 " with ", format);
  } else {
    view.shape[2] *= elements.values;
    if (flat && (view.shape[1] != (*flat)[0] || view.shape[2] != (*flat)[1])) {
      refuse_value(name, " is of [", view.shape[0], ", ", view.shape[1], ", ", view.shape[2],
                   "] values; w_format says ", (*flat)[0], " x ", (*flat)[1]);
    }
  }
  view.dtype = dtype;
  view.row_stride = view.shape[2];
  return view;
}

/// Scales in a format of values have its name.
ScaleType scale_type_of(const char* name, AtenTensorHandle tensor) {
  const std::int32_t number = dtype_number(tensor);
  if (number == numbers().uint8 || number == numbers().e8m0) return ScaleType::kE8m0;
  if (const std::optional<DType> dtype = library_dtype(number)) {
    for (const ScaleTypeInfo& info : kScaleTypes) {
      if (std::string_view(info.name) == to_string(*dtype)) return info.value;
    }
  }
  refuse_type(name, " has dtype ", dtype_name(tensor), "; accepted are ", names_of(kScaleTypes),
              " (float8_e8m0fnu or uint8)");
}

bool is_contiguous(AtenTensorHandle tensor, int rank) {
  std::int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  std::int64_t expected = 1;
  for (int dim = rank - 1; dim >= 0; --dim) {
    if (sizes[dim] == 0) return true;
    if (sizes[dim] > 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

/// Its elements without gaps.
const void* dense_data(AtenTensorHandle tensor, Device device, std::optional<Tensor>& copy) {
  std::int64_t rank = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &rank));
  if (!is_contiguous(tensor, static_cast<int>(rank))) {
    copy = contiguous(tensor, device);
    return copy->const_data_ptr();
  }
  return readable_data(tensor);
}

}  // namespace

PackedWeight::PackedWeight(const char* name, AtenTensorHandle w, const char* scales_name,
                           AtenTensorHandle scales, const std::string& format, DType dtype)
    : w_tensor_(w), scales_tensor_(scales) {
  if (scales != nullptr) {
    const Extents extents(scales_name, scales);
    scales_.rank = extents.rank;
    scales_.shape = extents.shape;
    scales_.device = extents.device;
    scales_.type = scale_type_of(scales_name, scales);
  }
  std::string text = format;
  if (format_named(format) == WeightFormat::kPlain) parse_quantization(format, scales_.type, 1, 1);
  view_ = decoded_view(name, w, text, dtype);
  quantization_ = parse_quantization(text, scales_.type, view_.shape[1], view_.shape[2]);
}

void PackedWeight::read() {
  view_.data = const_cast<void*>(dense_data(w_tensor_, view_.device, w_copy_));
  scales_.data = dense_data(scales_tensor_, scales_.device, scales_copy_);
}

}  // namespace moegemm::torch_ops
