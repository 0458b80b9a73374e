#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layer/layer_run.h"
#include "testing/device/memory.h"

namespace moegemm::cli {

/// Accepts decimal integers of that range and says so when it refuses. For transform(): CLI11 reads
/// what is left as decimal, "010" too.
CLI::Validator whole_number(std::int64_t least, std::int64_t most);
/// Accepts numbers of that range, so not nan.
CLI::Validator number(double least, double most);

/// The device of a layer: in words, and its memory.
struct OpenDevice {
  std::string words;
  std::unique_ptr<testing::Memory> memory;
};
/// Throws when there is no such device, and when it has fewer than `needed_bytes`, with what would
/// need fewer.
OpenDevice open_device(const LayerSpec& spec, double needed_bytes);

/// The flags that describe a layer, and --json: shared by the subcommands that take a layer.
class LayerOptions {
 public:
  /// Declares the flags on `command`; `with_routing` for those that draw tokens.
  LayerOptions(CLI::App& command, bool with_routing);

  /// The layer asked for: the preset, with every flag given on the command line put over it.
  /// Throws CLI::ValidationError when the numbers contradict each other.
  LayerSpec layer() const;
  bool json() const { return json_; }

 private:
  std::string preset_;
  std::optional<std::int64_t> experts_;
  std::optional<std::int64_t> topk_;
  std::optional<std::int64_t> hidden_;
  std::optional<std::int64_t> intermediate_;
  std::optional<std::int64_t> tokens_;
  std::string dtype_ = "bf16";
  std::string weights_;
  std::string device_ = "cpu";
  std::string backend_;
  std::string routing_ = "uniform";
  bool json_ = false;
};

}  // namespace moegemm::cli
