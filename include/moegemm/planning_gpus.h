#pragma once

#include <optional>
#include <string>
#include <vector>

#include "moegemm/export.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// The GPUs that problems can be planned for on a machine that has none, by their names for it:
/// "h200", "a100", ...
MOEGEMM_API std::vector<std::string> planning_gpus();

/// The device to put into a Problem for plan() and explain(); nothing for an unknown name. Nothing
/// runs on it.
MOEGEMM_API std::optional<Device> planning_gpu(const std::string& name);

}  // namespace moegemm
