#include "core/refusal.h"
#include "core/types/names.h"
#include "moegemm/plan.h"

namespace moegemm {

const char* to_string(BackendKind kind) { return name_in(kBackends, kind); }

std::string to_string(const KernelConfig& config) {
  std::string text;
  const auto add = [&text](const auto&... parts) {
    text += join(text.empty() ? "" : " ", parts...);
  };
  const auto extent = [](int value) { return value == 0 ? "any" : std::to_string(value); };
  if (!config.kernel.empty()) add("kernel ", config.kernel);
  if (config.block_rows != 0 || config.block_columns != 0 || config.block_depth != 0) {
    add("tile ", extent(config.block_rows), "x", extent(config.block_columns), "x",
        extent(config.block_depth));
  }
  if (config.stages != 0) add("stages ", config.stages);
  const auto add_flag = [&add](const char* name, const std::optional<bool>& flag) {
    if (flag) add(name, *flag ? "=on" : "=off");
  };
  add_flag("tma_load_rows", config.tma_load_rows);
  add_flag("tma_load_weights", config.tma_load_weights);
  add_flag("tma_store", config.tma_store);
  return text.empty() ? "any kernel" : text;
}

}  // namespace moegemm
