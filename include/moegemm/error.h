#pragma once

#include <stdexcept>
#include <string>

#include "moegemm/export.h"

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

}  // namespace moegemm
