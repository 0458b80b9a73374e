#include "cuda/backend/error.h"

#include "moegemm/error.h"

namespace moegemm::cuda {

std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorKind::kRuntime, "could not " + std::string(what) + ": " + describe(status));
}

}  // namespace moegemm::cuda
