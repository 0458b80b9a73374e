#pragma once

#include <cstdint>

namespace moegemm::cuda::sm80 {

/// Where results go: rows of `cols` elements.
struct OutputView {
  void* data;
  std::int64_t stride;  ///< elements
  int cols;
  bool is_fp32;     ///< else the input type
  bool accumulate;  ///< add to what is there; fp32 only
};

}  // namespace moegemm::cuda::sm80
