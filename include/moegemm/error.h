#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "moegemm/kinds.h"

/// What goes wrong: exceptions, and warnings of what was worked around.
namespace moegemm {

/// What went wrong, so that front ends can raise the matching exception of their language.
enum class ErrorKind {
  kInvalidValue,    ///< an argument has a value or shape that the rules refuse (Python: ValueError)
  kInvalidType,     ///< an argument has a dtype or device that the rules refuse (Python: TypeError)
  kNotImplemented,  ///< valid, but nothing compiled into this library runs it (NotImplementedError)
  kRuntime,         ///< the device or the system failed (RuntimeError)
};

/// The only exception this library throws on purpose. `what()` is a full sentence that names the
/// argument, the value it got and what is accepted.
class MOEGEMM_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

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
