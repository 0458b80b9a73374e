#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "layer/layer_run.h"

namespace moegemm::cli {

/// Accepts decimal integers of that range and says so when it refuses.
CLI::Validator whole_number(std::int64_t least, std::int64_t most);

/// The device in words; throws when there is none.
std::string describe_device(Device device);

/// Throws when the device has fewer than `needed` bytes, and says what would need fewer.
void require_memory(const LayerSpec& spec, double needed, testing::Memory& memory);

/// The flags that describe a layer, shared by the subcommands that take one.
class LayerOptions {
 public:
  /// Declares the flags on `command`.
  explicit LayerOptions(CLI::App& command);

  /// The layer asked for: the preset, with every flag given on the command line put over it.
  /// Throws CLI::ValidationError when the numbers contradict each other.
  LayerSpec layer() const;

 private:
  std::string preset_;
  std::int64_t experts_ = 0;
  std::int64_t topk_ = 0;
  std::int64_t hidden_ = 0;
  std::int64_t intermediate_ = 0;
  std::int64_t tokens_ = -1;
  std::string dtype_ = "bf16";
  std::string device_ = "cpu";
  std::string backend_;
};

}  // namespace moegemm::cli
