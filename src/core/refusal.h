#pragma once

#include <locale>
#include <sstream>
#include <string>

#include "moegemm/error.h"

/// Messages are put together only once something is wrong, so streams cost nothing that matters.
namespace moegemm {

/// Numbers are written the same way whatever std::locale::global() is: measurements are kept under
/// such texts.
template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void refuse_value(const Parts&... parts) {
  throw Error(ErrorKind::kInvalidValue, join(parts...));
}

template <typename... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
  throw Error(ErrorKind::kInvalidType, join(parts...));
}

}  // namespace moegemm
