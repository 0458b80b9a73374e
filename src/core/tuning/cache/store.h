#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>

#include "core/tuning/cache/tuning_file.h"

namespace moegemm {

/// What has been measured: by this process, and by others through the file. Trouble with the file
/// is told once and costs nothing but the memory of it: the process goes on with what it measured.
/// Safe to call from any thread.
class TuningStore {
 public:
  /// An empty path: nothing is kept beyond this process.
  explicit TuningStore(std::filesystem::path path) : path_(std::move(path)) {}

  const std::filesystem::path& path() const { return path_; }

  /// Looks in the process first; the file is read again only when somebody has changed it.
  std::optional<TunedRecord> find(const TuningKey& key);
  /// Remembers, and adds everything not yet saved to the file.
  void put(const TunedRecords& records);
  /// Remembers in this process only: what needed no measurement.
  void settle(const TuningKey& key, const TunedRecord& record);
  TunedRecords all();
  /// Forgets, also in the file; returns how many records there were.
  std::size_t clear();

 private:
  void refresh();
  void save();

  std::filesystem::path path_;
  std::mutex mutex_;
  TunedRecords known_;
  TunedRecords unsaved_;
  TunedRecords settled_;
  std::filesystem::file_time_type read_time_ = {};
  std::uintmax_t read_size_ = 0;
};

/// The store of the folder that the environment names now.
TuningStore& tuning_store();

}  // namespace moegemm
