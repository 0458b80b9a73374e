#include "core/process/environment.h"

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

}  // namespace

std::optional<BackendKind> environment_backend() {
  const std::string_view word = read("MOEGEMM_BACKEND");
  if (word.empty()) return std::nullopt;
  const std::optional<BackendKind> kind = parse_backend(std::string(word));
  if (!kind) {
    refuse_value("MOEGEMM_BACKEND is '", word, "'; accepted are reference, cpu, sm90 and sm80");
  }
  return kind;
}

bool environment_check() {
  const std::string_view word = read("MOEGEMM_CHECK");
  if (word.empty() || word == "0") return false;
  if (word == "1") return true;
  refuse_value("MOEGEMM_CHECK is '", word, "'; accepted are 0 and 1");
}

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
