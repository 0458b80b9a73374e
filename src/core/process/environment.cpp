#include "core/process/environment.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "core/refusal.h"

namespace moegemm {
namespace {

/// More workers than this is a typing error, not a machine.
constexpr int kMaxThreads = 4096;

std::string_view read(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

std::optional<BackendKind> backend_in(std::string_view word) {
  if (word.empty()) return std::nullopt;
  const std::optional<BackendKind> kind = parse_backend(std::string(word));
  if (!kind) {
    refuse_value("MOEGEMM_BACKEND is '", word, "'; accepted are reference, cpu, sm90 and sm80");
  }
  return kind;
}

bool check_in(std::string_view word) {
  if (word.empty() || word == "0") return false;
  if (word == "1") return true;
  refuse_value("MOEGEMM_CHECK is '", word, "'; accepted are 0 and 1");
}

}  // namespace

std::optional<BackendKind> environment_backend() { return backend_in(read("MOEGEMM_BACKEND")); }

CallEnvironment environment_of_call() {
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

bool CallEnvironment::check() const { return check_in(check_word); }

bool environment_allows_tuning() {
  const std::string_view word = read("MOEGEMM_AUTOTUNE");
  if (word == "0") return false;
  if (word.empty() || word == "1") return true;
  refuse_value("MOEGEMM_AUTOTUNE is '", word, "'; accepted are 0 and 1");
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
