#pragma once

#include <nlohmann/json.hpp>

#include "layer/layer_tune.h"
#include "moegemm/info.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"
#include "moegemm/tune.h"

/// How results leave the program for machines. The library of JSON finds these by their argument,
/// so that lists and structs of them are converted as well.
namespace moegemm {

void to_json(nlohmann::json& json, const TileShape& tile);
void to_json(nlohmann::json& json, const Step& step);
void to_json(nlohmann::json& json, const Plan& plan);
void to_json(nlohmann::json& json, const Problem& problem);
void to_json(nlohmann::json& json, const CpuInfo& cpu);
void to_json(nlohmann::json& json, const GpuInfo& gpu);
void to_json(nlohmann::json& json, const BackendInfo& backend);
void to_json(nlohmann::json& json, const KernelInfo& kernel);
void to_json(nlohmann::json& json, const CostEstimate& cost);
void to_json(nlohmann::json& json, const PlanCandidate& candidate);
void to_json(nlohmann::json& json, const TuneCandidate& candidate);

namespace cli {

void to_json(nlohmann::json& json, const LayerSpec& spec);
void to_json(nlohmann::json& json, const OpReport& report);
void to_json(nlohmann::json& json, const TunedProduct& product);

/// Names of devices and paths come from outside: what is not UTF-8 is replaced. JSON has no NaN: a
/// number that is not finite becomes null.
std::string to_text(const nlohmann::json& document);
/// The same on the standard output.
void print_json(const nlohmann::json& document);

}  // namespace cli
}  // namespace moegemm
