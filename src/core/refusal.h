#pragma once

#include <sstream>
#include <string>

#include "moegemm/error.h"

/// Messages are put together only once something is wrong, so streams cost nothing that matters.
namespace moegemm {

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
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
