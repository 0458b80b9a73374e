#pragma once

#include <cuda_runtime_api.h>

namespace moegemm::cuda {

/// While alive, this thread may make calls that a stream capture in another part of the program
/// would otherwise forbid (cudaStreamCaptureModeGlobal), such as loading a module on first use.
/// Such calls touch no stream, so a capture under way is not disturbed.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCaptureMode() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  ///< then the one to return to
};

}  // namespace moegemm::cuda
