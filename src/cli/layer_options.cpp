#include "layer_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "model_catalogue.h"
#include "moegemm/config.h"
#include "moegemm/error.h"
#include "moegemm/info.h"
#include "testing/device/memory.h"

namespace moegemm::cli {
namespace {

// Products of two extents stay inside 64 bits.
constexpr std::int64_t kLargestExtent = 1'000'000'000;

std::optional<Device> parse_device(const std::string& text) {
  if (text == "cpu") return Device{};
  if (text == "cuda") return Device{DeviceType::kCuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (!text.starts_with(kPrefix)) return std::nullopt;
  int index = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, index);
  if (parsed.ec != std::errc() || parsed.ptr != end || index < 0) return std::nullopt;
  return Device{DeviceType::kCuda, index};
}

std::string refuse_device(const std::string& text) {
  if (parse_device(text)) return {};
  return fmt::format("{} is not a device; accepted: cpu, cuda, cuda:0, cuda:1, ...", text);
}

const Model& require_model(const std::string& name) {
  const std::vector<std::string> names = model_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw CLI::ValidationError(
        "preset", fmt::format("no model is called {}; accepted: {}", name, fmt::join(names, ", ")));
  }
  return find_model(name);
}

DType parse_dtype(const std::string& name) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw CLI::ValidationError("--dtype", name + " not in {bf16,fp16,fp32}");
}

std::vector<std::string> backend_names() {
  return {to_string(BackendKind::kReference), to_string(BackendKind::kCpu),
          to_string(BackendKind::kSm90), to_string(BackendKind::kSm80)};
}

double gib(double bytes) { return bytes / (1 << 30); }

}  // namespace

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  const auto refuse = [least, most](const std::string& text) -> std::string {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, value);
    if (parsed.ec == std::errc() && parsed.ptr == end && value >= least && value <= most) return {};
    return fmt::format("got {}; accepted: a whole number from {} to {}", text, least, most);
  };
  return {refuse, ""};
}

LayerOptions::LayerOptions(CLI::App& command) : preset_(model_catalogue().front().name) {
  const auto positive = whole_number(1, kLargestExtent);
  const auto not_negative = whole_number(0, kLargestExtent);
  command
      .add_option(
          "preset", preset_,
          fmt::format("Model whose expert layer to take: {}", fmt::join(model_names(), ", ")))
      ->type_name("PRESET")
      ->capture_default_str();
  command.add_option("--experts", experts_, "Number of experts")->check(positive)->type_name("E");
  command.add_option("--topk", topk_, "Experts per token")->check(positive)->type_name("K");
  command.add_option("--hidden", hidden_, "Width of a token")->check(positive)->type_name("H");
  command.add_option("--intermediate", intermediate_, "Width inside an expert")
      ->check(positive)
      ->type_name("I");
  command.add_option("--tokens", tokens_, "Tokens in the batch")
      ->check(not_negative)
      ->type_name("T");
  command.add_option("--dtype", dtype_, "Type of tokens and weights")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
      ->type_name("")
      ->capture_default_str();
  command.add_option("--device", device_, "cpu, cuda or cuda:INDEX")
      ->check(CLI::Validator(refuse_device, ""))
      ->type_name("DEVICE")
      ->capture_default_str();
  command.add_option("--backend", backend_, "Force a backend; default: the best that can run")
      ->check(CLI::IsMember(backend_names()))
      ->type_name("");
}

LayerSpec LayerOptions::layer() const {
  const Model& model = require_model(preset_);
  LayerSpec spec;
  spec.name = model.name;
  spec.experts = experts_ > 0 ? experts_ : model.experts;
  spec.topk = topk_ > 0 ? topk_ : model.topk;
  spec.hidden = hidden_ > 0 ? hidden_ : model.hidden;
  spec.intermediate = intermediate_ > 0 ? intermediate_ : model.intermediate;
  spec.tokens = tokens_ >= 0 ? tokens_ : model.tokens;
  spec.dtype = parse_dtype(dtype_);
  spec.device = *parse_device(device_);
  if (!backend_.empty()) spec.backend = parse_backend(backend_);
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

std::string describe_device(Device device) {
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

void require_memory(const LayerSpec& spec, double needed, testing::Memory& memory) {
  const auto available = static_cast<double>(memory.available_bytes());
  if (needed <= available) return;
  throw Error(ErrorKind::kRuntime,
              fmt::format("this layer needs about {:.1f} GiB on {}, {:.1f} GiB are available: take "
                          "fewer --experts or --tokens, or a smaller preset",
                          gib(needed), to_string(spec.device), gib(available)));
}

}  // namespace moegemm::cli
