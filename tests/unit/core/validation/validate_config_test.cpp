#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

class ValidateConfig : public testing::ValidCall {};

TEST_F(ValidateConfig, TmaLoadOfAGatheredOperandIsRefused) {
  options.config.emplace();
  options.config->tma_load_rows = true;
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(dx());
  EXPECT_NO_THROW(dw());
  options.permute_y = true;
  EXPECT_NO_THROW(forward()) << "X is in expert order";
  EXPECT_NO_THROW(dw()) << "X is in expert order";
  expect_dx_refused(ErrorKind::kInvalidValue, {"tma_load_rows", "dX", "permute_y", "gathered"});
  options.permute_y = false;
  options.permute_x = true;
  EXPECT_NO_THROW(dx()) << "dY is in expert order";
  x = x_tokens;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"tma_load_rows", "forward", "permute_x", "gathered"});
  expect_dw_refused(ErrorKind::kInvalidValue, {"tma_load_rows", "dW", "permute_x", "gathered"});
}

TEST_F(ValidateConfig, TmaLoadOfGatheredGradientsInDwIsRefused) {
  options.config.emplace();
  options.config->tma_load_weights = true;
  options.permute_y = true;
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(dx());
  expect_dw_refused(ErrorKind::kInvalidValue, {"tma_load_weights", "dW", "permute_y", "gathered"});
}

TEST_F(ValidateConfig, TmaStoreOfScatteredRowsIsRefused) {
  options.config.emplace();
  options.config->tma_store = true;
  EXPECT_NO_THROW(forward());
  options.permute_y = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"tma_store", "forward", "permute_y"});
  EXPECT_NO_THROW(dx());
  EXPECT_NO_THROW(dw());
  options.permute_y = false;
  options.permute_x = true;
  expect_dx_refused(ErrorKind::kInvalidValue, {"tma_store", "dX", "permute_x"});
}

TEST_F(ValidateConfig, TmaSwitchedOffIsAlwaysAccepted) {
  options.config.emplace();
  options.config->tma_load_rows = options.config->tma_load_weights = options.config->tma_store =
      false;
  options.permute_y = true;
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(dx());
  EXPECT_NO_THROW(dw());
}

TEST_F(ValidateConfig, NegativeTileExtentsAreRefused) {
  options.config.emplace();
  options.config->block_rows = -64;
  expect_forward_refused(ErrorKind::kInvalidValue, {"block_rows is -64", "at least 0"});
  options.config.emplace();
  options.config->stages = -1;
  expect_forward_refused(ErrorKind::kInvalidValue, {"stages is -1", "at least 0"});
}

}  // namespace
}  // namespace moegemm
