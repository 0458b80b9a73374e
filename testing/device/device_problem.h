#pragma once

#include <optional>
#include <vector>

#include "moegemm/ops.h"
#include "testing/device/device_tensor.h"
#include "testing/problem/host_problem.h"

namespace moegemm::testing {

/// A HostProblem in the memory of a device, ready to be called any number of times.
class DeviceProblem {
 public:
  DeviceProblem(Memory& memory, const HostProblem& host);

  /// Puts the output back to what it was before the first call.
  void reset_output();
  /// Fills the output with NaN in the order of that memory's stream; can be captured.
  void poison_output(Memory& memory) {
    if (out_.bytes() > 0) memory.fill(out_.data(), kPoisonByte, out_.bytes());
  }
  /// Replaces the routing of an equally shaped problem, in place: what a captured graph reads.
  void upload_routing(const HostProblem& host);

  Plan call(const GemmOptions& options, const ExecutionContext& context) const;
  /// The options that the case asks for, to be refined by the caller.
  GemmOptions options() const;

  std::vector<unsigned char> output() const { return out_.download(); }
  /// Empty, or what was written to that must not be.
  std::string trespass() const;

 private:
  TensorView view_of(const HostMatrix& matrix, void* data) const;
  DeviceTensor upload(const HostMatrix& matrix);
  void upload_quantised(const QuantisedWeights& weights);

  Memory& memory_;
  const HostProblem& host_;
  DeviceTensor x_, w_, dy_, bias_, low_rows_, low_weights_;
  Buffer scales_;  ///< of quantised weights
  ScalesView scales_view_;
  Buffer out_;
  TensorView out_view_;
  Buffer sizes_, starts_, indices_, weights_;
  RoutingView routing_;
};

}  // namespace moegemm::testing
