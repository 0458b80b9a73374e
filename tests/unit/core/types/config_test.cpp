#include <gtest/gtest.h>

#include "moegemm/plan.h"

namespace moegemm {
namespace {

TEST(KernelConfig, PrintsOnlyWhatWasAskedFor) {
  KernelConfig config;
  EXPECT_EQ(to_string(config), "any kernel");
  config.block_rows = 64;
  config.block_depth = 32;
  EXPECT_EQ(to_string(config), "tile 64xanyx32");
  config.block_columns = 128;
  config.stages = 3;
  config.tma_load_rows = false;
  config.tma_store = true;
  EXPECT_EQ(to_string(config), "tile 64x128x32 stages 3 tma_load_rows=off tma_store=on");
  KernelConfig named;
  named.kernel = "fwd_gather";
  EXPECT_EQ(to_string(named), "kernel fwd_gather");
}

}  // namespace
}  // namespace moegemm
