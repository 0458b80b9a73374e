#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "arguments.h"
#include "moegemm/error.h"

/// How a file makes its operators part of torch.ops.moegemm: schema and function side by side.
namespace moegemm::torch_ops {

struct Operator {
  const char* schema;
  /// What TORCH_BOX makes of a function.
  void (*run)(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs);
};

inline void define(torch::stable::detail::StableLibrary& library,
                   std::span<const Operator> operators) {
  for (const Operator& one : operators) library.def(one.schema);
}

inline void implement(torch::stable::detail::StableLibrary& library,
                      std::span<const Operator> operators) {
  for (const Operator& one : operators) {
    const std::string_view schema = one.schema;
    library.impl(std::string(schema.substr(0, schema.find('('))).c_str(), one.run);
  }
}

// Through macros of our own: torch's would take the name of ours for the namespace.
#define MOEGEMM_FRAGMENT(space, m) STABLE_TORCH_LIBRARY_FRAGMENT(space, m)
#define MOEGEMM_IMPL(space, key, m) STABLE_TORCH_LIBRARY_IMPL(space, key, m)

/// Registers an array of operators that run on CPU and CUDA tensors alike.
#define MOEGEMM_REGISTER(operators)                                          \
  MOEGEMM_FRAGMENT(MOEGEMM_TORCH_NAMESPACE, m) { define(m, operators); }     \
  MOEGEMM_IMPL(MOEGEMM_TORCH_NAMESPACE, CPU, m) { implement(m, operators); } \
  MOEGEMM_IMPL(MOEGEMM_TORCH_NAMESPACE, CUDA, m) { implement(m, operators); }

/// The same of operators that take no tensors.
#define MOEGEMM_REGISTER_WITHOUT_TENSORS(operators)                      \
  MOEGEMM_FRAGMENT(MOEGEMM_TORCH_NAMESPACE, m) { define(m, operators); } \
  MOEGEMM_IMPL(MOEGEMM_TORCH_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, operators); }

/// Runs `body` and rethrows the library's errors as ones that torch can carry: a std::runtime_error
/// whose text starts with the Python type to raise, which python/moegemm/operators/errors.py puts
/// back.
template <class Body>
auto raising(Body&& body) {
  try {
    return body();
  } catch (const OutOfMemory& error) {
    throw std::runtime_error(std::string("[OutOfMemoryError] ") + error.what());
  } catch (const Error& error) {
    const char* type = "RuntimeError";
    switch (error.kind()) {
      case ErrorKind::kInvalidValue:
        type = "ValueError";
        break;
      case ErrorKind::kInvalidType:
        type = "TypeError";
        break;
      case ErrorKind::kNotImplemented:
        type = "NotImplementedError";
        break;
      case ErrorKind::kRuntime:
        break;
    }
    throw std::runtime_error(std::string("[") + type + "] " + error.what());
  }
}

}  // namespace moegemm::torch_ops
