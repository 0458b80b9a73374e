#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "conformance/driver/targets.h"
#include "testing/numerics/floats.h"
#include "testing/numerics/random.h"
#include "testing/numerics/sum_bound.h"
#include "testing/problem/host_problem.h"

/// What the tests of the passes share.
namespace moegemm::testing {

struct Place {
  const char* tensor;
  std::int64_t row;
  std::int64_t col;
};

inline std::ostream& operator<<(std::ostream& out, const Place& place) {
  return out << place.tensor << "[" << place.row << ", " << place.col << "]";
}

/// Whether the element is right; if not, the test has failed with its place.
inline bool expect_close(DType dtype, const std::vector<unsigned char>& bytes, std::int64_t at,
                         double want, double bound, const Place& place) {
  const double got = decode(dtype, bytes.data(), at);
  const bool written = !is_poison(dtype, bytes.data(), at);
  if (written && is_close(got, want, bound)) return true;
  ADD_FAILURE() << place << (written ? ": " : " was not written: ") << difference(got, want, bound);
  return false;
}

/// What lies before and between the rows.
inline void expect_untouched_padding(const HostMatrix& m, const std::vector<unsigned char>& bytes) {
  for (std::int64_t i = 0; i < m.offset && m.rows > 0; ++i) {
    ASSERT_TRUE(is_poison(m.dtype, bytes.data(), i)) << "element " << i << " before row 0";
  }
  for (std::int64_t r = 0; r + 1 < m.rows; ++r) {
    for (std::int64_t c = m.cols; c < m.stride; ++c) {
      ASSERT_TRUE(is_poison(m.dtype, bytes.data(), m.position(r, c))) << Place{"padding", r, c};
    }
  }
}

inline std::vector<float> random_weights(DType dtype, std::int64_t count, Random& random) {
  std::vector<float> weights(count);
  for (float& weight : weights) {
    encode(dtype, &weight, 0, random.symmetric());
    weight = decode(dtype, &weight, 0);
  }
  return weights;
}

/// A trimmed run takes each case once, with the dtypes in turn, and leaves out the large ones.
inline bool kept(std::size_t case_number, int dtype, std::int64_t elements) {
  return !trimmed_run() || (elements <= 20'000 && static_cast<int>(case_number % 3) == dtype);
}

}  // namespace moegemm::testing
