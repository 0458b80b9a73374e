#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "layer/layer_run.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

/// How results leave the program: tables for people, JSON for machines.
namespace moegemm::cli {

/// Cells padded to their column's width; `right_aligned[c]` for columns of numbers.
std::string format_table(const std::vector<std::string>& header,
                         const std::vector<std::vector<std::string>>& rows,
                         const std::vector<bool>& right_aligned);

/// "cpu avx512_dot 6x4x32": backend, kernel and tile, with the passes before and after it.
std::string plan_summary(const Plan& plan);

/// Names of devices and paths come from outside: what is not UTF-8 is replaced.
std::string to_text(const nlohmann::json& document);

nlohmann::json to_json(const Plan& plan);
nlohmann::json to_json(const Problem& problem);
nlohmann::json to_json(const LayerSpec& spec);
nlohmann::json to_json(const OpReport& report);

}  // namespace moegemm::cli
