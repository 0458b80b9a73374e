#include <algorithm>
#include <charconv>
#include <string>

#include "core/refusal.h"
#include "core/types/names.h"
#include "moegemm/epilogue.h"

namespace moegemm {
namespace {

float number(const std::string& name, const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) {
    refuse_value(name, " is '", text, "'; a number is accepted");
  }
  return static_cast<float>(value);
}

}  // namespace

const char* to_string(ActivationFunction function) {
  return name_in(kActivationFunctions, function);
}

const char* to_string(GateLayout layout) { return name_in(kGateLayouts, layout); }

std::string to_string(const Activation& activation) {
  std::string text = join(to_string(activation.function), "/", to_string(activation.layout));
  constexpr Activation kPlain;
  if (activation.alpha != kPlain.alpha) text += join(" alpha=", activation.alpha);
  if (activation.limit != kPlain.limit) text += join(" limit=", activation.limit);
  if (activation.up_offset != kPlain.up_offset) text += join(" up_offset=", activation.up_offset);
  return text;
}

Activation parse_activation(const std::string& text) {
  Activation activation;
  const std::size_t first_end = std::min(text.find(' '), text.size());
  const std::size_t slash = text.find('/');
  if (slash >= first_end) {
    refuse_value("activation is '", text, "'; its form is function/layout, as in silu/none");
  }
  activation.function = value_named("activation", text.substr(0, slash), kActivationFunctions);
  activation.layout =
      value_named("layout", text.substr(slash + 1, first_end - slash - 1), kGateLayouts);
  for (std::size_t begin = first_end + 1; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::size_t equals = std::min(text.find('=', begin), end);
    const std::string name = text.substr(begin, equals - begin);
    float* const field = name == "alpha"       ? &activation.alpha
                         : name == "limit"     ? &activation.limit
                         : name == "up_offset" ? &activation.up_offset
                                               : nullptr;
    if (field == nullptr || equals == end) {
      refuse_value("activation is '", text, "'; after function/layout it may have alpha=, limit= ",
                   "and up_offset=, each with a number");
    }
    *field = number(name, text.substr(equals + 1, end - equals - 1));
    begin = end + 1;
  }
  return activation;
}

}  // namespace moegemm
