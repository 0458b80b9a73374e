#include "core/tuning/cache/tuning_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <thread>

#include "core/refusal.h"

namespace moegemm {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;
/// Of new files, less what the umask takes away: users who share the folder share them.
constexpr mode_t kMode = 0666;
/// A writer holds the lock for milliseconds; one that holds it for longer is stopped or stuck on a
/// network, and nobody should wait for that.
constexpr std::chrono::seconds kLockPatience{10};

[[noreturn]] void fail(const std::string& reason) { throw std::runtime_error(reason); }
std::string last_error() { return std::strerror(errno); }

fs::path beside(const fs::path& path, const std::string& suffix) {
  fs::path result = path;
  result += suffix;
  return result;
}

/// An exclusive lock on a file beside the real one: the real one is replaced, so a lock on it would
/// be on a file that nobody opens any more.
class FileLock {
 public:
  explicit FileLock(const fs::path& path) {
    const fs::path name = beside(path, ".lock");
    descriptor_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kMode);
    const std::string refusal = last_error();
    // Another user's: to lock it is enough to read it (on NFS it is not, hence the first try).
    if (descriptor_ < 0) descriptor_ = open(name.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor_ < 0) fail(join("cannot open ", shown(name), ": ", refusal));
    const auto give_up = std::chrono::steady_clock::now() + kLockPatience;
    while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
      const bool taken = errno == EWOULDBLOCK || errno == EINTR;
      if (!taken || std::chrono::steady_clock::now() > give_up) {
        const std::string reason = taken ? "another process holds it" : last_error();
        close(descriptor_);
        fail(join("cannot lock ", shown(name), ": ", reason));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  ~FileLock() {
    flock(descriptor_, LOCK_UN);  // closing leaves the lock to a child forked in the meantime
    close(descriptor_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

/// A new file of that name. What could not be written whole is removed.
void write_text(const fs::path& path, const std::string& text) {
  unlink(path.c_str());  // what a killed writer left may be another user's
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
  const auto give_up = [&] {
    const std::string reason = last_error();
    unlink(path.c_str());
    fail(join("cannot write ", shown(path), ": ", reason));
  };
  if (descriptor < 0) give_up();
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(descriptor, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int reason = errno;
      close(descriptor);
      errno = reason;
      give_up();
    }
    written += static_cast<std::size_t>(count);
  }
  // Not synced to the disk: a file that a crash of the machine leaves damaged is ignored, and
  // waiting for the disk would hold up every other writer.
  if (close(descriptor) != 0) give_up();
}

/// Nothing where there is no file.
std::optional<std::string> read_text(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return std::nullopt;
  if (status.type() != fs::file_type::regular) fail("it is not a readable file");
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(join("it cannot be opened: ", last_error()));
  std::string text;
  char part[16384];
  ssize_t count = 0;
  while ((count = read(descriptor, part, sizeof(part))) != 0) {
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const std::string reason = last_error();
      close(descriptor);
      fail(join("it cannot be read: ", reason));
    }
    text.append(part, static_cast<std::size_t>(count));
  }
  close(descriptor);
  return text;
}

/// The same, with the path in the reason. What cannot be read now may be whole: it stays.
std::optional<std::string> read_to_merge(const fs::path& path) {
  try {
    return read_text(path);
  } catch (const std::runtime_error& error) {
    fail(join(shown(path), ": ", error.what()));
  }
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    fail(join("cannot create ", shown(folder), ": ", error.message(),
              "; MOEGEMM_CACHE_DIR can name another folder"));
  }
}

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

CacheRoot cache_root() {
  const std::string_view chosen = variable("MOEGEMM_CACHE_DIR");
  if (!chosen.empty()) return {chosen, {}};
  const std::string_view xdg = variable("XDG_CACHE_HOME");
  // The XDG specification: a relative path there is invalid and ignored.
  if (xdg.starts_with('/')) return {xdg, "moegemm"};
  return {variable("HOME"), ".cache/moegemm"};
}

fs::path CacheRoot::file() const {
  return word.empty() ? fs::path() : fs::path(word) / below / "tuning.json";
}

std::string shown(const fs::path& path) {
  return nlohmann::json::parse(nlohmann::json(path.string())
                                   .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))
      .get<std::string>();
}

std::string to_json_text(const TunedRecords& records) {
  nlohmann::json entries = nlohmann::json::array();
  for (const auto& [key, record] : records) {
    entries.push_back({{"device", key.device},
                       {"version", key.version},
                       {"kernel_set", key.kernel_set},
                       {"problem", key.problem},
                       {"kernel", record.kernel},
                       {"us", record.us},
                       {"heuristic", record.heuristic},
                       {"heuristic_us", record.heuristic_us}});
  }
  // Device names come from drivers: bytes that are not UTF-8 must not end the program.
  return nlohmann::json{{"moegemm_tuning", kFormat}, {"entries", entries}}.dump(
             1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

TunedRecords parse_json_text(const std::string& text) {
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, false);
  if (document.is_discarded()) fail("it is not JSON");
  if (!document.is_object() || !document.contains("moegemm_tuning")) {
    fail("it holds no measurements of moegemm");
  }
  if (document["moegemm_tuning"] != kFormat) {
    fail(join("its format is ", document["moegemm_tuning"].dump(), ", this version reads ",
              kFormat));
  }
  TunedRecords records;
  try {
    for (const auto& entry : document.at("entries")) {
      const TuningKey key = {entry.at("device"), entry.at("version"), entry.at("kernel_set"),
                             entry.at("problem")};
      records[key] = {entry.at("kernel"), entry.at("us"), entry.at("heuristic"),
                      entry.at("heuristic_us")};
    }
  } catch (const nlohmann::json::exception& error) {
    fail(join("an entry is incomplete (", error.what(), ")"));
  }
  return records;
}

TunedRecords read_tuning_file(const fs::path& path) {
  const std::optional<std::string> text = read_text(path);
  return text ? parse_json_text(*text) : TunedRecords();
}

void merge_into_tuning_file(const fs::path& path, const TunedRecords& added) {
  make_folder(path.parent_path());
  const FileLock lock(path);
  // One name for every writer: the lock lets in one at a time, and what a killed one left is
  // overwritten by the next.
  const fs::path partial = beside(path, ".partial");
  std::error_code error;
  TunedRecords merged;
  if (const std::optional<std::string> text = read_to_merge(path)) {
    try {
      merged = parse_json_text(*text);
    } catch (const std::runtime_error&) {
      fs::rename(path, beside(path, ".unreadable"), error);
    }
  }
  for (const auto& [key, record] : added) merged.insert_or_assign(key, record);
  write_text(partial, to_json_text(merged));
  fs::rename(partial, path, error);
  if (error) fail(join("cannot replace ", shown(path), ": ", error.message()));
}

void remove_tuning_file(const fs::path& path) {
  if (std::error_code ignored; !fs::exists(path, ignored)) return;
  const FileLock lock(path);
  std::error_code error;
  fs::remove(path, error);
  if (error) fail(join("cannot remove ", shown(path), ": ", error.message()));
}

}  // namespace moegemm
