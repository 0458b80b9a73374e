#pragma once

#include <string>

#include "moegemm/error.h"

namespace moegemm {

/// Tells the user, once per process and message.
void warn_once(const std::string& message);

}  // namespace moegemm
