#include "layer_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "model_catalogue.h"
#include "moegemm/error.h"
#include "moegemm/info.h"
#include "moegemm/plan.h"

namespace moegemm::cli {
namespace {

// Products of two extents stay inside 64 bits.
constexpr std::int64_t kLargestExtent = 1'000'000'000;

/// Numbers from here on are those of the GPUs that can be planned for and are not here.
int first_planning_gpu() { return planning_gpu(planning_gpus().front())->index; }

std::optional<Device> parse_device(const std::string& text) {
  if (text == "cpu") return Device{};
  if (text == "cuda") return Device{DeviceType::kCuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (!text.starts_with(kPrefix)) return std::nullopt;
  int index = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, index);
  if (parsed.ec != std::errc() || parsed.ptr != end || index < 0) return std::nullopt;
  if (index >= first_planning_gpu()) return std::nullopt;
  return Device{DeviceType::kCuda, index};
}

std::string refuse_device(const std::string& text) {
  if (parse_device(text)) return {};
  return fmt::format("{} is not a device; accepted: cpu, cuda, cuda:0, cuda:1, ...", text);
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const LayerSpec& model : model_catalogue()) names.push_back(model.name);
  return names;
}

const LayerSpec& require_model(const std::string& name) {
  for (const LayerSpec& model : model_catalogue()) {
    if (model.name == name) return model;
  }
  throw CLI::ValidationError("preset", fmt::format("no model is called {}; accepted: {}", name,
                                                   fmt::join(model_names(), ", ")));
}

/// Declares a flag that takes a name of the table.
template <typename Table>
CLI::Option* add_choice(CLI::App& command, const char* flag, std::string& name, const char* help,
                        const Table& table) {
  std::vector<std::string> names;
  for (const auto& entry : table) names.emplace_back(entry.name);
  return command.add_option(flag, name, help)->check(CLI::IsMember(names))->type_name("");
}

/// The one of that name, which a check has let pass.
template <typename Table>
auto choice(const std::string& name, const Table& table) {
  return std::find_if(std::begin(table), std::end(table),
                      [&](const auto& entry) { return name == entry.name; })
      ->value;
}

std::string describe(Device device) {
  if (device.type == DeviceType::kCpu) {
    const CpuInfo cpu = cpu_info();
    return fmt::format("{} ({}, {} threads)", cpu.model, cpu.isa, cpu.threads);
  }
  std::string why_none;
  const std::vector<GpuInfo> found = gpus(&why_none);
  if (found.empty()) {
    throw Error(ErrorKind::kRuntime,
                fmt::format("--device {}: {}; accepted here: cpu", to_string(device), why_none));
  }
  if (device.index >= static_cast<int>(found.size())) {
    throw Error(ErrorKind::kRuntime,
                fmt::format("--device {}: accepted here: cpu, cuda:0 to cuda:{}", to_string(device),
                            found.size() - 1));
  }
  return found[static_cast<std::size_t>(device.index)].name;
}

double gib(double bytes) { return bytes / (1 << 30); }

}  // namespace

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  const auto refuse = [least, most](std::string& text) -> std::string {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, value);
    if (parsed.ec == std::errc() && parsed.ptr == end && value >= least && value <= most) {
      text = std::to_string(value);  // CLI11 would read "010" as octal
      return {};
    }
    return fmt::format("got {}; accepted: a whole number from {} to {}", text, least, most);
  };
  return {refuse, ""};
}

CLI::Validator number(double least, double most) {
  const auto refuse = [least, most](const std::string& text) -> std::string {
    double value = 0;
    // Not CLI::Range, which lets nan pass.
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return {};
    return fmt::format("got {}; accepted: a number from {} to {}", text, least, most);
  };
  return {refuse, ""};
}

LayerOptions::LayerOptions(CLI::App& command, bool with_routing)
    : preset_(model_catalogue().front().name) {
  command
      .add_option(
          "preset", preset_,
          fmt::format("Model whose expert layer to take: {}", fmt::join(model_names(), ", ")))
      ->type_name("PRESET")
      ->capture_default_str();
  const auto add_extent = [&](const char* flag, std::optional<std::int64_t>& extent,
                              const char* help, const char* letter, int least = 1) {
    command.add_option(flag, extent, help)
        ->transform(whole_number(least, kLargestExtent))
        ->type_name(letter);
  };
  add_extent("--experts", experts_, "Number of experts", "E");
  add_extent("--topk", topk_, "Experts per token", "K");
  add_extent("--hidden", hidden_, "Width of a token", "H");
  add_extent("--intermediate", intermediate_, "Width inside an expert", "I");
  add_extent("--tokens", tokens_, "Tokens in the batch", "T", 0);
  add_choice(command, "--dtype", dtype_, "Type of tokens and weights", kFloatingFormats)
      ->capture_default_str();
  add_choice(command, "--weights", weights_,
             "Quantised weights, decoded inside the products; default: of that type",
             kWeightFormats);
  command.add_option("--device", device_, "cpu, cuda or cuda:INDEX")
      ->check(CLI::Validator(refuse_device, ""))
      ->type_name("DEVICE")
      ->capture_default_str();
  add_choice(command, "--backend", backend_, "Force a backend; default: the best that can run",
             kBackends);
  if (with_routing) {
    add_choice(command, "--routing", routing_, "How tokens choose experts", kRoutingPatterns)
        ->capture_default_str();
  }
  command.add_flag("--json", json_, "Print as JSON");
}

LayerSpec LayerOptions::layer() const {
  LayerSpec spec = require_model(preset_);
  spec.experts = experts_.value_or(spec.experts);
  spec.topk = topk_.value_or(spec.topk);
  spec.hidden = hidden_.value_or(spec.hidden);
  spec.intermediate = intermediate_.value_or(spec.intermediate);
  spec.tokens = tokens_.value_or(spec.tokens);
  spec.dtype = choice(dtype_, kFloatingFormats);
  if (!weights_.empty()) spec.weights = choice(weights_, kWeightFormats);
  spec.device = *parse_device(device_);
  spec.pattern = choice(routing_, kRoutingPatterns);
  if (!backend_.empty()) spec.backend = choice(backend_, kBackends);
  if (spec.topk > spec.experts) {
    throw CLI::ValidationError(
        "--topk", fmt::format("{} experts per token, but there are {}; accepted: 1 to {}",
                              spec.topk, spec.experts, spec.experts));
  }
  if (spec.rows() > std::numeric_limits<std::int32_t>::max()) {
    throw CLI::ValidationError(
        "--tokens",
        fmt::format("{} tokens times {} experts each do not fit 32-bit row indices; "
                    "accepted: up to {}",
                    spec.tokens, spec.topk, std::numeric_limits<std::int32_t>::max() / spec.topk));
  }
  return spec;
}

OpenDevice open_device(const LayerSpec& spec, double needed_bytes) {
  OpenDevice opened{describe(spec.device), testing::open_memory(spec.device)};
  const auto available = static_cast<double>(opened.memory->available_bytes());
  if (needed_bytes <= available) return opened;
  throw Error(ErrorKind::kRuntime,
              fmt::format("this layer needs about {:.1f} GiB on {}, {:.1f} GiB are available: take "
                          "fewer --experts or --tokens, or a smaller preset",
                          gib(needed_bytes), to_string(spec.device), gib(available)));
}

}  // namespace moegemm::cli
