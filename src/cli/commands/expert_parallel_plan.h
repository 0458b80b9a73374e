#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "layer/layer_run.h"

namespace moegemm::cli {

/// Which ranks hold a layer's experts, and what is between them.
struct ExpertParallelOptions {
  std::int64_t ranks = 0;
  std::int64_t nodes = 1;
  double link_gb_per_second = 0;  ///< that a GPU gets on the slowest way; 0: that of the model
};

/// One way to send tokens to the ranks of their experts.
struct ExchangeWay {
  std::string name;             ///< "slot", "rank" or "node": what a token travels once for
  double copies_per_token = 0;  ///< that leave for a rank, its own included
  double sent_bytes = 0;        ///< by a rank, over the slowest link, in one direction
  double us = 0;
};

/// One layer of one rank, forward, with routing that is even: arithmetic, nothing is measured.
struct ExpertParallelPlan {
  ExpertParallelOptions options;
  std::int64_t experts_per_rank = 0;
  std::int64_t rows_per_rank = 0;  ///< received, and in the products
  double weight_bytes = 0;         ///< of both products' weights
  double row_bytes = 0;            ///< [rows, hidden]
  double kept_bytes = 0;           ///< for the backward: received rows and the first product
  double products_us = 0;
  double pass_us = 0;  ///< one pass over [rows, hidden]
  std::vector<ExchangeWay> ways;

  double local_us() const;  ///< pack and combine: two passes and the tokens'
  std::string bound() const;
  std::string text() const;
  nlohmann::json json() const;
};

/// Throws Error with the option's name if the ranks divide neither experts nor nodes.
ExpertParallelPlan plan_expert_parallel(const LayerSpec& spec, ExpertParallelOptions options);

}  // namespace moegemm::cli
