#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "cuda/host/error.h"

namespace moegemm::cuda {

/// Bytes that exist twice, on the host and on the device, and are copied over on demand.
class MirroredBytes {
 public:
  explicit MirroredBytes(std::size_t size, unsigned char fill = 0) : host_(size, fill) {
    check(cudaMalloc(&device_, size + 1), "allocate device memory");
    upload();
  }
  ~MirroredBytes() { static_cast<void>(cudaFree(device_)); }
  MirroredBytes(const MirroredBytes&) = delete;
  MirroredBytes& operator=(const MirroredBytes&) = delete;

  void upload() {
    check(cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice), "upload");
  }
  /// What the device holds now, leaving the host's bytes alone.
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> bytes(host_.size());
    check(cudaMemcpy(bytes.data(), device_, bytes.size(), cudaMemcpyDeviceToHost), "download");
    return bytes;
  }
  unsigned char* host() { return host_.data(); }
  const unsigned char* host() const { return host_.data(); }
  unsigned char* device() const { return static_cast<unsigned char*>(device_); }
  std::size_t size() const { return host_.size(); }
  bool matches_device() const {
    return std::memcmp(download().data(), host_.data(), host_.size()) == 0;
  }

 private:
  std::vector<unsigned char> host_;
  void* device_ = nullptr;
};

}  // namespace moegemm::cuda
