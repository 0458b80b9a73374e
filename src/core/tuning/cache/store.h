#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "core/tuning/cache/tuning_file.h"

namespace moegemm {

/// A problem that keeps the heuristic's kernel without a measurement.
struct SettledRecord {
  TunedRecord record;
  std::string why;
  /// A larger budget is worth another try.
  double budget_seconds = 0;
};

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
  /// Remembers, and adds everything not yet saved to the file. Returns why that failed, as a
  /// clause; empty when all is saved.
  std::string put(const TunedRecords& records);
  /// Remembers in this process only: what has no measurement, so that no call looks for one again.
  void settle(const TuningKey& key, const SettledRecord& settled);
  std::optional<SettledRecord> find_settled(const TuningKey& key);
  TunedRecords all();
  /// Forgets, also in the file; returns how many records there were.
  std::size_t clear();

  /// Around a fork: nobody else changes or reads the store.
  void hold() { mutex_.lock(); }
  void release() { mutex_.unlock(); }

 private:
  void refresh();
  std::string save();

  std::filesystem::path path_;
  std::mutex mutex_;
  TunedRecords known_;
  TunedRecords unsaved_;
  std::map<TuningKey, SettledRecord> settled_;
  std::filesystem::file_time_type read_time_ = {};
  std::uintmax_t read_size_ = 0;
};

/// The store of the folder that the environment names now. Quick: every call with autotune asks.
TuningStore& tuning_store();

/// Around a fork: all stores that there are, and no new one.
void hold_tuning_stores();
void release_tuning_stores();

}  // namespace moegemm
