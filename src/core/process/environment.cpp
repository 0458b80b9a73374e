#include "core/process/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "core/process/warning.h"
#include "core/refusal.h"
#include "core/types/names.h"
#include "moegemm/execution.h"

namespace moegemm {
namespace {

/// Everything that moegemm reads, in C++ and in Python.
constexpr std::array<std::string_view, 9> kNames = {
    "MOEGEMM_AUTOTUNE",   "MOEGEMM_BACKEND",     "MOEGEMM_BATCH_INVARIANT",
    "MOEGEMM_CACHE_DIR",  "MOEGEMM_CHECK",       "MOEGEMM_CPU_ISA",
    "MOEGEMM_LOAD_EARLY", "MOEGEMM_NUM_THREADS", "MOEGEMM_TORCH_LIBRARY",
};

/// More workers than this is a typing error, not a machine.
constexpr int kMaxThreads = 4096;

std::string_view read(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

std::optional<BackendKind> backend_in(std::string_view word) {
  if (word.empty()) return std::nullopt;
  return value_named("MOEGEMM_BACKEND", std::string(word), kBackends);
}

/// A switch that is `otherwise` when it is not set.
bool switch_in(std::string_view name, std::string_view word, bool otherwise) {
  if (word.empty()) return otherwise;
  if (word == "0" || word == "1") return word == "1";
  refuse_value(name, " is '", word, "'; accepted are 0 and 1");
}

}  // namespace

void check_environment() {
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view entry = *variable;
    const std::string_view name = entry.substr(0, entry.find('='));
    if (!name.starts_with("MOEGEMM_") || name.starts_with("MOEGEMM_TEST_")) continue;
    if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) continue;
    std::string known;
    for (const std::string_view each : kNames) known += join(known.empty() ? "" : ", ", each);
    warn_once(join("the environment variable ", name, " means nothing; known are ", known));
  }
  static_cast<void>(loads_early());
}

bool loads_early() { return switch_in("MOEGEMM_LOAD_EARLY", read("MOEGEMM_LOAD_EARLY"), true); }

std::optional<BackendKind> environment_backend() { return backend_in(read("MOEGEMM_BACKEND")); }

CallEnvironment environment_of_call() {
  [[maybe_unused]] static const bool checked = (check_environment(), true);
  constexpr std::string_view kBackend = "MOEGEMM_BACKEND=";
  constexpr std::string_view kCheck = "MOEGEMM_CHECK=";
  CallEnvironment found;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const char* text = *variable;
    if (text[0] != 'M' || text[1] != 'O') continue;
    const std::string_view entry = text;
    // The first of a name counts, as for getenv.
    const auto take = [&](std::string_view name, std::string_view& word) {
      if (word.data() == nullptr && entry.starts_with(name)) word = entry.substr(name.size());
    };
    take(kBackend, found.backend_word);
    take(kCheck, found.check_word);
  }
  return found;
}

std::optional<BackendKind> CallEnvironment::backend() const { return backend_in(backend_word); }

bool CallEnvironment::check() const { return switch_in("MOEGEMM_CHECK", check_word, false); }

bool environment_allows_tuning() {
  return switch_in("MOEGEMM_AUTOTUNE", read("MOEGEMM_AUTOTUNE"), true);
}

bool environment_batch_invariant() {
  return switch_in("MOEGEMM_BATCH_INVARIANT", read("MOEGEMM_BATCH_INVARIANT"), true);
}

std::optional<int> environment_num_threads() {
  const std::string_view word = read("MOEGEMM_NUM_THREADS");
  if (word.empty()) return std::nullopt;
  int count = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), count);
  if (error != std::errc{} || end != word.data() + word.size() || count < 1 ||
      count > kMaxThreads) {
    refuse_value("MOEGEMM_NUM_THREADS is '", word, "'; accepted are 1 to ", kMaxThreads);
  }
  return count;
}

}  // namespace moegemm
