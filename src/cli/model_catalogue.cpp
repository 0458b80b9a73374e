#include "model_catalogue.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "models_json.h"

namespace moegemm::cli {
namespace {

// Enough rows per expert that weights are reused, few enough that a laptop holds the activations.
constexpr std::int64_t kDefaultTokens = 2048;

std::vector<Model> parse_catalogue() {
  std::vector<Model> models;
  const nlohmann::json catalogue = nlohmann::json::parse(kModelsJson);
  for (const auto& entry : catalogue.at("models")) {
    models.push_back({.name = entry.at("name"),
                      .experts = entry.at("experts"),
                      .topk = entry.at("topk"),
                      .hidden = entry.at("hidden"),
                      .intermediate = entry.at("intermediate"),
                      .tokens = entry.value("tokens", kDefaultTokens)});
  }
  return models;
}

}  // namespace

const std::vector<Model>& model_catalogue() {
  static const std::vector<Model> models = parse_catalogue();
  return models;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& model : model_catalogue()) names.push_back(model.name);
  return names;
}

const Model& find_model(const std::string& name) {
  for (const Model& model : model_catalogue()) {
    if (model.name == name) return model;
  }
  throw std::out_of_range("no model named " + name);
}

}  // namespace moegemm::cli
