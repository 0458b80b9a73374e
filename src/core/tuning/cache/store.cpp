#include "core/tuning/cache/store.h"

#include <list>
#include <stdexcept>

#include "core/process/warning.h"
#include "core/refusal.h"

namespace moegemm {

namespace fs = std::filesystem;

std::optional<TunedRecord> TuningStore::find(const TuningKey& key) {
  const std::lock_guard lock(mutex_);
  auto found = known_.find(key);
  if (found == known_.end()) {
    refresh();
    found = known_.find(key);
  }
  if (found != known_.end()) return found->second;
  const auto settled = settled_.find(key);
  return settled == settled_.end() ? std::nullopt : std::optional(settled->second.record);
}

void TuningStore::settle(const TuningKey& key, const SettledRecord& settled) {
  const std::lock_guard lock(mutex_);
  settled_.insert_or_assign(key, settled);
}

std::optional<SettledRecord> TuningStore::find_settled(const TuningKey& key) {
  const std::lock_guard lock(mutex_);
  if (known_.contains(key)) return std::nullopt;
  const auto settled = settled_.find(key);
  return settled == settled_.end() ? std::nullopt : std::optional(settled->second);
}

std::string TuningStore::put(const TunedRecords& records) {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, record] : records) {
    known_.insert_or_assign(key, record);
    unsaved_.insert_or_assign(key, record);
  }
  std::string failure = save();
  if (!failure.empty()) warn_once(join("measurements are kept in this process only: ", failure));
  return failure;
}

TunedRecords TuningStore::all() {
  const std::lock_guard lock(mutex_);
  refresh();
  return known_;
}

std::size_t TuningStore::clear() {
  const std::lock_guard lock(mutex_);
  refresh();
  const std::size_t count = known_.size();
  known_.clear();
  unsaved_.clear();
  settled_.clear();
  read_time_ = {};
  read_size_ = 0;
  if (path_.empty()) return count;
  try {
    remove_tuning_file(path_);
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::kRuntime, join("the tuning cache stays: ", error.what()));
  }
  return count;
}

void TuningStore::refresh() {
  if (path_.empty()) return;
  std::error_code error;
  const fs::file_time_type time = fs::last_write_time(path_, error);
  if (error) return;  // no file, or none that may be looked at
  const std::uintmax_t size = fs::file_size(path_, error);
  if (time == read_time_ && size == read_size_) return;
  read_time_ = time;
  read_size_ = size;
  try {
    TunedRecords stored = read_tuning_file(path_);
    for (const auto& [key, record] : unsaved_) stored.insert_or_assign(key, record);
    known_.merge(stored);
  } catch (const std::runtime_error& failure) {
    warn_once(join("the tuning cache ", shown(path_), " is ignored: ", failure.what()));
  }
}

std::string TuningStore::save() {
  if (path_.empty()) return "none of MOEGEMM_CACHE_DIR, XDG_CACHE_HOME and HOME names a folder";
  try {
    merge_into_tuning_file(path_, unsaved_);
    unsaved_.clear();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

namespace {

struct Stores {
  struct OfRoot {
    explicit OfRoot(const CacheRoot& root)
        : word(root.word), below(root.below), store(root.file()) {}

    std::string word;
    std::string below;
    TuningStore store;
  };
  std::mutex mutex;
  std::list<OfRoot> list;

  static Stores& of_process() {
    // Never destroyed: other threads may still plan while the process exits.
    static auto* stores = new Stores;
    return *stores;
  }
};

}  // namespace

TuningStore& tuning_store() {
  Stores& stores = Stores::of_process();
  const CacheRoot root = cache_root();
  const std::lock_guard lock(stores.mutex);
  for (auto known = stores.list.begin(); known != stores.list.end(); ++known) {
    if (root != CacheRoot{known->word, known->below}) continue;
    stores.list.splice(stores.list.begin(), stores.list, known);  // found first the next time
    return known->store;
  }
  return stores.list.emplace_front(root).store;
}

void hold_tuning_stores() {
  Stores& stores = Stores::of_process();
  stores.mutex.lock();
  for (Stores::OfRoot& of_root : stores.list) of_root.store.hold();
}

void release_tuning_stores() {
  Stores& stores = Stores::of_process();
  for (Stores::OfRoot& of_root : stores.list) of_root.store.release();
  stores.mutex.unlock();
}

}  // namespace moegemm
