#pragma once

#include <vector>

#include "arguments.h"
#include "moegemm/ops.h"

namespace moegemm::torch_ops {

/// Lends memory of torch's allocator to one call. It goes back when the call returns: the allocator
/// hands it out again in the order of the stream.
class TorchMemory final : public MemorySupport {
 public:
  void* allocate(std::int64_t bytes, Device device) override {
    lent_.push_back(allocate_bytes(bytes, device));
    return lent_.back().mutable_data_ptr();
  }

 private:
  std::vector<Tensor> lent_;
};

}  // namespace moegemm::torch_ops
