#include "core/refusal.h"

#include <gtest/gtest.h>

#include <locale>
#include <string>

namespace moegemm {
namespace {

struct GroupsDigits : std::numpunct<char> {
  std::string do_grouping() const override { return "\3"; }
  char do_decimal_point() const override { return ','; }
};

TEST(Join, WritesNumbersTheSameInEveryLocale) {
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new GroupsDigits));
  const std::string text = join("M = ", 1234567, ", ", 0.5);
  std::locale::global(before);
  EXPECT_EQ(text, "M = 1234567, 0.5");
}

}  // namespace
}  // namespace moegemm
