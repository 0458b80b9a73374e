#pragma once

#include <functional>
#include <string>

#include "moegemm/export.h"

namespace moegemm {

/// Where the library tells of something that it worked around, such as a cache file it cannot read.
using WarningHandler = std::function<void(const std::string& message)>;

/// Replaces the handler; an empty one restores the default, one line on stderr. Each message is
/// handed over once per process.
MOEGEMM_API void set_warning_handler(WarningHandler handler);

}  // namespace moegemm
