#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moegemm::cli {

/// The expert part of one published model, or the small one the demo uses.
struct Model {
  std::string name;
  std::int64_t experts = 0;
  std::int64_t topk = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t tokens = 0;  ///< a batch that suits it
};

/// Everything in data/models.json, in that file's order; the first one is the default.
const std::vector<Model>& model_catalogue();
std::vector<std::string> model_names();
/// The model of that name; throws std::out_of_range for a name that is not in the catalogue.
const Model& find_model(const std::string& name);

}  // namespace moegemm::cli
