#include "cuda/sm80/plan/pitch.h"

#include <limits>
#include <string>

#include "moegemm/error.h"

namespace moegemm::cuda::sm80 {

RowPitch row_pitch(const char* name, std::int64_t stride, DType dtype) {
  constexpr std::int64_t kMostBytes = std::numeric_limits<unsigned>::max();
  constexpr unsigned kMostUnits = 16;
  const std::int64_t bytes = stride * size_bytes(dtype);
  for (unsigned units = 1; units <= kMostUnits && bytes % units == 0; units *= 2) {
    if (bytes / units <= kMostBytes) return {static_cast<unsigned>(bytes / units), units};
  }
  throw Error(ErrorKind::kNotImplemented,
              std::string("rows of ") + name + " are " + std::to_string(bytes) +
                  " bytes apart, must be less than 64 GiB and, from 4 GiB on, a multiple of 16");
}

}  // namespace moegemm::cuda::sm80
