#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>

#include "commands/commands.h"
#include "moegemm/error.h"
#include "moegemm/tune.h"
#include "output/json.h"
#include "output/report.h"

namespace moegemm::cli {
namespace {

struct CacheOptions {
  bool json = false;
  std::string export_to = "-";
  std::string import_from;
};

std::string where() {
  const std::string path = tuning_cache_path();
  return path.empty() ? "nowhere (set MOEGEMM_CACHE_DIR, XDG_CACHE_HOME or HOME)" : path;
}

int show(const CacheOptions& options) {
  const std::vector<TunedEntry> entries = tuning_cache_entries();
  if (options.json) {
    const nlohmann::json stored = nlohmann::json::parse(export_tuning_cache());
    print_json({{"path", tuning_cache_path()}, {"entries", stored.at("entries")}});
    return kSuccess;
  }
  fmt::print("{}: {} measurements\n", where(), entries.size());
  std::string device;
  std::vector<std::vector<std::string>> rows;
  const auto print_rows = [&] {
    if (rows.empty()) return;
    fmt::print(
        "\n{}\n{}", device,
        format_table({"problem", "fastest", "us", "gain"}, rows, {false, false, true, true}));
    rows.clear();
  };
  for (const TunedEntry& entry : entries) {
    const std::string here =
        fmt::format("{}; version {}; kernels {}", entry.device, entry.version, entry.kernel_set);
    if (here != device) {
      print_rows();
      device = here;
    }
    const double gain = entry.us > 0 ? (entry.heuristic_us / entry.us - 1) * 100 : 0;
    rows.push_back({entry.problem, entry.kernel, fmt::format("{:.1f}", entry.us),
                    fmt::format("{:+.1f}%", gain)});
  }
  print_rows();
  return kSuccess;
}

int clear() {
  fmt::print("{} measurements removed from {}\n", clear_tuning_cache(), where());
  return kSuccess;
}

int export_to(const std::string& path) {
  const std::string text = export_tuning_cache();
  if (path == "-") {
    fmt::print("{}", text);
    return kSuccess;
  }
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Error(ErrorKind::kRuntime, fmt::format("cannot write {}", path));
  fmt::print("{} measurements written to {}\n", tuning_cache_entries().size(), path);
  return kSuccess;
}

int import_from(const std::string& path) {
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    std::ifstream file(path, std::ios::binary);
    if (!file || std::filesystem::is_directory(path)) {
      throw Error(
          ErrorKind::kInvalidValue,
          fmt::format("cannot read {}; a file that `cache export` wrote is accepted", path));
    }
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  fmt::print("{} measurements added to {}\n", import_tuning_cache(text), where());
  return kSuccess;
}

}  // namespace

Command add_cache_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("cache", "Show, clear, export or import what `tune` and autotune found.");
  command->require_subcommand(1);
  auto options = std::make_shared<CacheOptions>();
  CLI::App* show_command = command->add_subcommand("show", "List the measurements");
  show_command->add_flag("--json", options->json, "Print as JSON");
  command->add_subcommand("clear", "Remove every measurement");
  command->add_subcommand("export", "Write the measurements to a file, for another machine")
      ->add_option("file", options->export_to, "Where to; - is the standard output")
      ->type_name("FILE")
      ->capture_default_str();
  command->add_subcommand("import", "Add the measurements of an exported file")
      ->add_option("file", options->import_from, "Where from; - is the standard input")
      ->required()
      ->type_name("FILE");
  return [command, options] {
    if (command->got_subcommand("clear")) return clear();
    if (command->got_subcommand("export")) return export_to(options->export_to);
    if (command->got_subcommand("import")) return import_from(options->import_from);
    return show(*options);
  };
}

}  // namespace moegemm::cli
