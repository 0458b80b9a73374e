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

/// Warns of environment variables that begin with MOEGEMM_ and mean nothing, most likely misspelt
/// names; MOEGEMM_TEST_ is left to tests. Throws kInvalidValue for a bad MOEGEMM_LOAD_EARLY. The
/// first product of a process does it too; values of other variables are refused where they are
/// read.
MOEGEMM_API void check_environment();

}  // namespace moegemm
