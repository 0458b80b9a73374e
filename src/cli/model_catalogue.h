#pragma once

#include <vector>

#include "layer/layer_run.h"

namespace moegemm::cli {

/// The expert layers of the published models in data/models.json, and the small one of the demo,
/// each with a batch that suits it. In that file's order; the first one is the default.
const std::vector<LayerSpec>& model_catalogue();

}  // namespace moegemm::cli
