#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "core/tuning/cache/bucket.h"

/// The JSON file that keeps measurements between processes.
namespace moegemm {

struct TunedRecord {
  std::string kernel;  ///< the fastest
  double us = 0;
  std::string heuristic;  ///< what the heuristic would have taken
  double heuristic_us = 0;

  bool operator==(const TunedRecord&) const = default;
};

using TunedRecords = std::map<TuningKey, TunedRecord>;

/// What names the folder of the cache: MOEGEMM_CACHE_DIR, else moegemm in XDG_CACHE_HOME or
/// ~/.cache. Not to be kept: it points into the environment.
struct CacheRoot {
  std::string_view word;   ///< of the environment; empty when none of these is set
  std::string_view below;  ///< the folder there; empty: the word itself

  bool operator==(const CacheRoot&) const = default;
  /// The file of measurements; empty when nothing names a folder.
  std::filesystem::path file() const;
};
CacheRoot cache_root();

/// A path in messages: bytes that are not UTF-8, which Python and JSON do not take, are replaced.
std::string shown(const std::filesystem::path& path);

std::string to_json_text(const TunedRecords& records);
/// Throws std::runtime_error, with the reason as a clause, for anything that is not such a text.
TunedRecords parse_json_text(const std::string& text);

/// What the file holds; nothing if there is no file. Throws std::runtime_error with the reason when
/// it cannot be read or is not ours.
TunedRecords read_tuning_file(const std::filesystem::path& path);

/// Adds `added` to the file: reads it, merges and renames a complete new file over it, all under a
/// lock that many processes can contend for and that dies with its holder. A file that is not ours
/// is kept under another name. Throws std::runtime_error with the reason when the file cannot be
/// read, which then stays as it is, or written.
void merge_into_tuning_file(const std::filesystem::path& path, const TunedRecords& added);

/// Removes the file, under the same lock. Throws as merge_into_tuning_file does.
void remove_tuning_file(const std::filesystem::path& path);

}  // namespace moegemm
