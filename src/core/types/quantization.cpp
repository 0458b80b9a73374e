#include "moegemm/quantization.h"

#include <algorithm>
#include <charconv>

#include "core/refusal.h"
#include "core/types/names.h"

namespace moegemm {
namespace {

constexpr const char* kAccepted =
    "mxfp4, fp8/128x128, fp8/channel, fp8/tensor, int4/32 and nf4/64 (or other groups and blocks)";

bool read_number(const std::string& text, std::int64_t& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stop == end && number > 0;
}

/// After the slash of fp8: "128x128", "channel" or "tensor".
bool read_fp8_blocks(const std::string& blocks, std::int64_t n, std::int64_t k,
                     Quantization& result) {
  if (blocks == "channel" || blocks == "tensor") {
    result.block_n = blocks == "channel" ? 1 : n;
    result.block_k = k;
    return true;
  }
  const std::size_t times = blocks.find('x');
  return times != std::string::npos && read_number(blocks.substr(0, times), result.block_n) &&
         read_number(blocks.substr(times + 1), result.block_k);
}

}  // namespace

const char* to_string(WeightFormat format) {
  return format == WeightFormat::kPlain ? "plain" : name_in(kWeightFormats, format);
}

const char* to_string(ScaleType type) { return name_in(kScaleTypes, type); }

std::string to_string(const Quantization& quantization) {
  const char* const name = to_string(quantization.format);
  switch (quantization.format) {
    case WeightFormat::kPlain:
    case WeightFormat::kMxfp4:
      return name;
    case WeightFormat::kNf4:
      return join(name, "/", quantization.block_k);
    case WeightFormat::kInt4:
      return join(name, "/", quantization.block_k, "(", to_string(quantization.scale_type), ")");
    case WeightFormat::kFp8:
      break;
  }
  return join(name, "/", quantization.block_n, "x", quantization.block_k, "(",
              to_string(quantization.scale_type), ")");
}

std::string to_string(const ScalesView& scales) {
  if (!scales.given()) return "not given";
  std::string text = join(to_string(scales.type), "[");
  for (int i = 0; i < scales.rank; ++i) text += join(i == 0 ? "" : ", ", scales.shape[i]);
  return text + "] on " + to_string(scales.device);
}

Quantization parse_quantization(const std::string& text, ScaleType scale_type, std::int64_t n,
                                std::int64_t k) {
  Quantization result;
  result.scale_type = scale_type;
  const std::size_t slash = std::min(text.find('/'), text.size());
  const std::string blocks = text.substr(std::min(slash + 1, text.size()));
  const auto format = find_named(kWeightFormats, text.substr(0, slash));
  bool valid = format.has_value();
  if (valid) {
    result.format = *format;
    switch (*format) {
      case WeightFormat::kPlain:
        break;
      case WeightFormat::kMxfp4:
        valid = slash == text.size();
        break;
      case WeightFormat::kFp8:
        valid = read_fp8_blocks(blocks, n, k, result);
        break;
      case WeightFormat::kInt4:
      case WeightFormat::kNf4:
        valid = read_number(blocks, result.block_k);
        break;
    }
  }
  if (!valid) refuse_value("w_format is '", text, "'; accepted are ", kAccepted);
  return result;
}

}  // namespace moegemm
