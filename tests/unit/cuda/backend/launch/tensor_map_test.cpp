#include "cuda/backend/launch/tensor_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "cuda/backend/device_facts.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

using testing::HasSubstr;

/// Of a [8, 128, 64] bf16 tensor at an address that nobody reads.
TensorMapSpec valid_spec() {
  return tensor_spec(reinterpret_cast<const void*>(std::uintptr_t{1} << 20), DType::kBFloat16,
                     {64, 128, 8}, {128, 128 * 128}, {64, 128, 1});
}

std::string refusal(const std::function<void(TensorMapSpec&)>& break_it) {
  TensorMapSpec spec = valid_spec();
  break_it(spec);
  try {
    encode(spec);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(TensorMap, RefusalNamesTheFieldAndItsValue) {
  const auto expect = [](const char* text, const std::function<void(TensorMapSpec&)>& break_it) {
    EXPECT_THAT(refusal(break_it), HasSubstr(text));
  };
  expect("rank is 6", [](TensorMapSpec& s) { s.rank = 6; });
  expect("rank is 0", [](TensorMapSpec& s) { s.rank = 0; });
  expect("base is 0", [](TensorMapSpec& s) { s.base = nullptr; });
  expect("base is 1048584", [](TensorMapSpec& s) {
    s.base = reinterpret_cast<const void*>((std::uintptr_t{1} << 20) + 8);
  });
  expect("dims[1] is 0", [](TensorMapSpec& s) { s.dims[1] = 0; });
  expect("dims[2] is 4294967297", [](TensorMapSpec& s) { s.dims[2] = (1ull << 32) + 1; });
  expect("strides_bytes[0] is 130", [](TensorMapSpec& s) { s.strides_bytes[0] = 130; });
  expect("strides_bytes[1] is 1099511627776",
         [](TensorMapSpec& s) { s.strides_bytes[1] = 1ull << 40; });
  expect("box[1] is 257", [](TensorMapSpec& s) { s.box[1] = 257; });
  expect("box[2] is 0", [](TensorMapSpec& s) { s.box[2] = 0; });
  expect("box[0] in bytes is 24", [](TensorMapSpec& s) { s.box[0] = 12; });
  expect("box[0] in bytes is 256", [](TensorMapSpec& s) { s.box[0] = 128; });
}

TEST(TensorMap, WithoutADriverItSaysSo) {
  if (device_count() > 0) {
    EXPECT_EQ(refusal([](TensorMapSpec&) {}), "");
  } else {
    EXPECT_THAT(refusal([](TensorMapSpec&) {}), HasSubstr("cuTensorMapEncodeTiled"));
  }
}

}  // namespace
}  // namespace moegemm::cuda
