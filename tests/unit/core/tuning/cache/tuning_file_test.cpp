#include "core/tuning/cache/tuning_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <thread>

#include "core/tuning/cache/store.h"
#include "moegemm/error.h"
#include "unit/core/scoped_environment.h"
#include "unit/core/tuning/cache/temporary_folder.h"

namespace moegemm {
namespace {

using ::testing::HasSubstr;
using testing::ScopedEnvironment;
using testing::TemporaryFolder;

TuningKey key(const std::string& problem) { return {"gpu", "0.1.0", "sm90 1234", problem}; }
TunedRecord record(const std::string& kernel) { return {kernel, 12.5, "default", 13}; }

class TuningFileTest : public ::testing::Test {
 protected:
  TuningFileTest() {
    set_warning_handler([this](const std::string& message) { warnings.push_back(message); });
  }
  ~TuningFileTest() override { set_warning_handler({}); }

  void write_text(const std::string& text) const { std::ofstream(file) << text; }

  TemporaryFolder folder;
  std::filesystem::path file = folder.path() / "nested" / "tuning.json";
  std::vector<std::string> warnings;
};

TEST_F(TuningFileTest, WhatIsWrittenIsRead) {
  merge_into_tuning_file(file, {{key("a"), record("k1")}});
  merge_into_tuning_file(file, {{key("b"), record("k2")}});
  const TunedRecords read = read_tuning_file(file);
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read.at(key("a")), record("k1"));
  EXPECT_EQ(read.at(key("b")), record("k2"));
}

TEST_F(TuningFileTest, NewerMeasurementReplacesTheOlder) {
  merge_into_tuning_file(file, {{key("a"), record("k1")}});
  merge_into_tuning_file(file, {{key("a"), record("k2")}});
  EXPECT_EQ(read_tuning_file(file).at(key("a")).kernel, "k2");
}

TEST_F(TuningFileTest, MissingFileIsEmpty) { EXPECT_TRUE(read_tuning_file(file).empty()); }

TEST_F(TuningFileTest, DeviceVersionAndKernelSetAreApart) {
  TunedRecords records;
  for (const char* device : {"a", "b"}) {
    for (const char* version : {"1", "2"}) {
      for (const char* kernels : {"x", "y"}) {
        records[{device, version, kernels, "p"}] = record("k");
      }
    }
  }
  merge_into_tuning_file(file, records);
  EXPECT_EQ(read_tuning_file(file), records);
}

TEST_F(TuningFileTest, EightWritersAtOnceLoseNothing) {
  constexpr int kWriters = 8;
  constexpr int kRecords = 20;
  std::vector<pid_t> children;
  for (int w = 0; w < kWriters; ++w) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int failures = 0;
      for (int r = 0; r < kRecords; ++r) {
        try {
          const std::string name = std::to_string(w) + "." + std::to_string(r);
          merge_into_tuning_file(file, {{key(name), record("k of " + name)}});
        } catch (const std::exception&) {
          ++failures;
        }
      }
      _exit(failures);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  const TunedRecords read = read_tuning_file(file);
  EXPECT_EQ(read.size(), static_cast<std::size_t>(kWriters * kRecords));
  for (const auto& [where, found] : read) EXPECT_EQ(found.kernel, "k of " + where.problem);
}

TEST_F(TuningFileTest, KilledWriterLeavesAWholeFileAndAFreeLock) {
  merge_into_tuning_file(file, {{key("before"), record("k")}});
  for (int attempt = 0; attempt < 12; ++attempt) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      // Larger with each record, so that the kill falls into reading, writing and renaming alike.
      for (int r = 0;; ++r) {
        merge_into_tuning_file(file, {{key("x" + std::to_string(r % 400)), record("k")}});
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(4000 + 3100 * attempt));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status));
    const TunedRecords read = read_tuning_file(file);  // throws if it is not whole
    EXPECT_EQ(read.count(key("before")), 1u);
    const TuningKey mine = key("after" + std::to_string(attempt));
    merge_into_tuning_file(file, {{mine, record("k")}});
    EXPECT_EQ(read_tuning_file(file).count(mine), 1u);
  }
}

TEST_F(TuningFileTest, HalfWrittenTemporaryFileIsIgnoredAndReplaced) {
  merge_into_tuning_file(file, {{key("a"), record("k")}});
  std::ofstream(file.string() + ".partial") << R"({"moegemm_tuning": 1, "entr)";
  merge_into_tuning_file(file, {{key("b"), record("k")}});
  EXPECT_EQ(read_tuning_file(file).size(), 2u);
}

struct Foreign {
  const char* name;
  const char* text;
};
class ForeignTuningFile : public TuningFileTest, public ::testing::WithParamInterface<Foreign> {};

TEST_P(ForeignTuningFile, IsIgnoredWithOneWarningAndKeptAside) {
  std::filesystem::create_directories(file.parent_path());
  write_text(GetParam().text);
  TuningStore store(file);
  EXPECT_FALSE(store.find(key("a")));
  EXPECT_FALSE(store.find(key("b")));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr(file.string()));
  store.put({{key("a"), record("k")}});
  EXPECT_EQ(read_tuning_file(file).size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(file.string() + ".unreadable"));
}

INSTANTIATE_TEST_SUITE_P(
    Files, ForeignTuningFile,
    ::testing::Values(Foreign{"Empty", ""}, Foreign{"Truncated", R"({"moegemm_tuning": 1, "ent)"},
                      Foreign{"Binary", "\x7f\x45\x4c\x46\x02\xff\xfe"}, Foreign{"Number", "17"},
                      Foreign{"OtherProgram", R"({"version": 3, "entries": []})"},
                      Foreign{"OtherFormat", R"({"moegemm_tuning": 2, "entries": []})"},
                      Foreign{"EntryWithoutKernel",
                              R"({"moegemm_tuning": 1, "entries": [{"device": "x"}]})"},
                      Foreign{"EntriesOfAnotherType", R"({"moegemm_tuning": 1, "entries": 5})"}),
    [](const auto& foreign) { return std::string(foreign.param.name); });

TEST_F(TuningFileTest, FolderThatCannotBeWrittenCostsOneWarningAndTheProcessGoesOn) {
  // A file where the folder should be: no permissions stop a test that runs as root.
  std::ofstream(folder.path() / "nested") << "in the way";
  TuningStore store(file);
  store.put({{key("a"), record("k")}});
  store.put({{key("b"), record("k")}});
  EXPECT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("this process only"));
  EXPECT_TRUE(store.find(key("a")));
  EXPECT_TRUE(store.find(key("b")));
}

TEST_F(TuningFileTest, ReadOnlyFolderIsReadAndCostsOneWarning) {
  using std::filesystem::perms;
  merge_into_tuning_file(file, {{key("old"), record("k")}});
  std::filesystem::remove(file.string() + ".lock");
  std::filesystem::permissions(file.parent_path(), perms::owner_read | perms::owner_exec |
                                                       perms::others_read | perms::others_exec);
  std::filesystem::permissions(folder.path(), perms::owner_all | perms::others_exec);
  std::filesystem::permissions(file, perms::owner_read | perms::others_read);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    // Root may write everywhere.
    if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) _exit(1);
    TuningStore store(file);
    if (!store.find(key("old"))) _exit(2);
    store.put({{key("a"), record("k")}});
    store.put({{key("b"), record("k")}});
    if (!store.find(key("a")) || !store.find(key("b"))) _exit(3);
    _exit(warnings.size() == 1 ? 0 : 4);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(read_tuning_file(file).size(), 1u);
}

TEST_F(TuningFileTest, FileThatCannotBeReadStaysWhereItIs) {
  merge_into_tuning_file(file, {{key("old"), record("k")}});
  EXPECT_NE(chmod(folder.path().c_str(), 0755), -1);
  EXPECT_NE(chmod(file.parent_path().c_str(), 0777), -1);
  EXPECT_NE(chmod(file.c_str(), 0), -1);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) _exit(1);
    TuningStore store(file);
    const std::string failure = store.put({{key("new"), record("k")}});
    const bool told = failure == file.string() + ": it cannot be opened: Permission denied";
    _exit(told && store.find(key("new")) ? 0 : 2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_NE(chmod(file.c_str(), 0644), -1);
  EXPECT_EQ(read_tuning_file(file).count(key("old")), 1u);
  EXPECT_FALSE(std::filesystem::exists(file.string() + ".unreadable"));
}

TEST_F(TuningFileTest, FolderInPlaceOfTheFileStays) {
  std::filesystem::create_directories(file);
  TuningStore store(file);
  EXPECT_EQ(store.put({{key("a"), record("k")}}), file.string() + ": it is not a readable file");
  EXPECT_TRUE(std::filesystem::is_directory(file));
}

TEST_F(TuningFileTest, SecondUserOfASharedFolderAddsToTheFile) {
  constexpr uid_t kNobody = 65534;
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  merge_into_tuning_file(file, {{key("first"), record("k")}});
  EXPECT_NE(chmod(folder.path().c_str(), 0755), -1);
  EXPECT_NE(chmod(file.parent_path().c_str(), 0777), -1);
  EXPECT_NE(chmod((file.string() + ".lock").c_str(), 0644), -1) << "as the usual umask leaves it";
  std::ofstream(file.string() + ".partial") << "left by a killed writer";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(1);
    try {
      merge_into_tuning_file(file, {{key("second"), record("k")}});
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(2);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_tuning_file(file).size(), 2u);
}

TEST_F(TuningFileTest, FileThatCannotBeWrittenWholeLeavesTheOldOneAndSaysWhy) {
  merge_into_tuning_file(file, {{key("old"), record("k")}});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // As on a full disk, write() fails in the middle.
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {64, 64};
    setrlimit(RLIMIT_FSIZE, &limit);
    TuningStore store(file);
    const std::string failure = store.put({{key("new"), record("k")}});
    const bool told = warnings.size() == 1 && failure.find("cannot write") != std::string::npos;
    _exit(told && store.find(key("new")) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_tuning_file(file).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(file.string() + ".partial"));
}

TEST_F(TuningFileTest, MessagesAboutAPathThatIsNotUtf8AreUtf8) {
  const std::filesystem::path odd = folder.path() / "caf\xe9" / "tuning.json";
  merge_into_tuning_file(odd, {{key("a"), record("k")}});
  EXPECT_EQ(read_tuning_file(odd).size(), 1u);
  EXPECT_EQ(shown(odd), folder.path().string() + "/caf\xef\xbf\xbd/tuning.json");
  std::ofstream(odd) << "no JSON";
  TuningStore(odd).all();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("caf\xef\xbf\xbd"));
}

TEST_F(TuningFileTest, StoreSeesWhatAnotherProcessAdds) {
  TuningStore mine(file);
  EXPECT_FALSE(mine.find(key("a")));
  TuningStore theirs(file);
  theirs.put({{key("a"), record("k")}});
  EXPECT_EQ(mine.find(key("a")).value().kernel, "k");
}

TEST_F(TuningFileTest, ClearForgetsInProcessAndFile) {
  TuningStore store(file);
  store.put({{key("a"), record("k")}, {key("b"), record("k")}});
  EXPECT_EQ(store.clear(), 2u);
  EXPECT_FALSE(store.find(key("a")));
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_EQ(store.clear(), 0u);
}

TEST_F(TuningFileTest, FolderComesFromTheEnvironment) {
  const ScopedEnvironment home("HOME", "/someone");
  const ScopedEnvironment xdg("XDG_CACHE_HOME", "");
  const ScopedEnvironment own("MOEGEMM_CACHE_DIR", "");
  EXPECT_EQ(cache_root().file(), "/someone/.cache/moegemm/tuning.json");
  {
    const ScopedEnvironment set("XDG_CACHE_HOME", "/caches");
    EXPECT_EQ(cache_root().file(), "/caches/moegemm/tuning.json");
    const ScopedEnvironment outranks("MOEGEMM_CACHE_DIR", "/here");
    EXPECT_EQ(cache_root().file(), "/here/tuning.json");
  }
  const ScopedEnvironment relative("XDG_CACHE_HOME", "caches");
  EXPECT_EQ(cache_root().file(), "/someone/.cache/moegemm/tuning.json");
  const ScopedEnvironment nobody("HOME", "");
  EXPECT_EQ(cache_root().file(), "");
}

}  // namespace
}  // namespace moegemm
