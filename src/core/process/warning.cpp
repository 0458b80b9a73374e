#include "core/process/warning.h"

#include <cstdio>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace moegemm {
namespace {

struct Warnings {
  std::mutex mutex;
  std::unordered_set<std::string> told;
  WarningHandler handler;

  static Warnings& of_process() {
    // Never destroyed: threads may still warn while the process exits.
    static auto* warnings = new Warnings;
    return *warnings;
  }
};

}  // namespace

void set_warning_handler(WarningHandler handler) {
  Warnings& warnings = Warnings::of_process();
  const std::lock_guard lock(warnings.mutex);
  warnings.handler = std::move(handler);
}

void warn_once(const std::string& message) {
  Warnings& warnings = Warnings::of_process();
  WarningHandler handler;
  {
    const std::lock_guard lock(warnings.mutex);
    if (!warnings.told.insert(message).second) return;
    handler = warnings.handler;
  }
  if (handler) return handler(message);
  static_cast<void>(std::fprintf(stderr, "moegemm: warning: %s\n", message.c_str()));
}

void hold_warnings() { Warnings::of_process().mutex.lock(); }
void release_warnings() { Warnings::of_process().mutex.unlock(); }

}  // namespace moegemm
