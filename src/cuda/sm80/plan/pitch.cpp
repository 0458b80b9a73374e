#include "cuda/sm80/plan/pitch.h"

#include <limits>
#include <string>

#include "moegemm/error.h"

namespace moegemm::cuda::sm80 {

unsigned pitch_bytes(const char* name, std::int64_t stride, DType dtype) {
  const std::int64_t bytes = stride * size_bytes(dtype);
  if (bytes > std::numeric_limits<unsigned>::max()) {
    throw Error(ErrorKind::kNotImplemented, std::string("rows of ") + name + " are " +
                                                std::to_string(bytes) +
                                                " bytes apart, must be less than 4 GiB");
  }
  return static_cast<unsigned>(bytes);
}

}  // namespace moegemm::cuda::sm80
