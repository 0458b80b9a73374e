#include "model_catalogue.h"

#include <nlohmann/json.hpp>

#include "models_json.h"

namespace moegemm::cli {
namespace {

// Enough rows per expert that weights are reused, few enough that a laptop holds the activations.
constexpr std::int64_t kDefaultTokens = 2048;

std::vector<LayerSpec> parse_catalogue() {
  std::vector<LayerSpec> models;
  const nlohmann::json catalogue = nlohmann::json::parse(kModelsJson);
  for (const auto& entry : catalogue.at("models")) {
    LayerSpec& model = models.emplace_back();
    model.name = entry.at("name");
    model.experts = entry.at("experts");
    model.topk = entry.at("topk");
    model.hidden = entry.at("hidden");
    model.intermediate = entry.at("intermediate");
    model.tokens = entry.value("tokens", kDefaultTokens);
  }
  return models;
}

}  // namespace

const std::vector<LayerSpec>& model_catalogue() {
  static const std::vector<LayerSpec> models = parse_catalogue();
  return models;
}

}  // namespace moegemm::cli
