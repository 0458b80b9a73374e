#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cli/program.h"

namespace moegemm::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kSmallLayer = "--experts 5 --topk 2 --hidden 48 --intermediate 24 --tokens 33 ";

/// Each test has a cache of its own.
class ProgramTune : public ::testing::Test {
 protected:
  ProgramTune()
      : folder(std::filesystem::temp_directory_path() /
               ("moegemm_cli_cache_" + std::to_string(getpid()))) {
    setenv("MOEGEMM_CACHE_DIR", folder.c_str(), 1);
  }
  ~ProgramTune() override {
    unsetenv("MOEGEMM_CACHE_DIR");
    std::filesystem::remove_all(folder);
  }
  std::filesystem::path folder;
};

TEST_F(ProgramTune, MeasuresTheSixProductsAndRemembersThem) {
  const ProgramResult first = run_program("tune --json " + kSmallLayer);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.err, IsEmpty());
  const auto products = first.json().at("products");
  ASSERT_EQ(products.size(), 6);
  int measured = 0;
  for (const auto& product : products) {
    if (product.at("measured")) ++measured;
  }
  EXPECT_EQ(measured, 4) << "dX and dW have several kernels on the CPU";
  const auto shown = run_program("cache show --json").json();
  EXPECT_EQ(shown.at("entries").size(), 4);
  EXPECT_THAT(shown.at("path").get<std::string>(), HasSubstr(folder.string()));

  const auto again = run_program("tune --json " + kSmallLayer).json();
  for (const auto& product : again.at("products")) EXPECT_FALSE(product.at("measured"));
}

TEST_F(ProgramTune, TableNamesKernelTimeAndCache) {
  const ProgramResult result = run_program("tune " + kSmallLayer);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* text : {"forward 1", "dX 2", "fastest", "measured", "tuning.json"}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
}

TEST_F(ProgramTune, EnvironmentForbidsIt) {
  setenv("MOEGEMM_AUTOTUNE", "0", 1);
  const auto document = run_program("tune --json " + kSmallLayer).json();
  unsetenv("MOEGEMM_AUTOTUNE");
  for (const auto& product : document.at("products")) {
    EXPECT_EQ(product.at("status"), "MOEGEMM_AUTOTUNE is 0");
  }
}

TEST_F(ProgramTune, CacheIsExportedClearedAndImported) {
  run_program("tune " + kSmallLayer);
  std::filesystem::create_directories(folder);
  const std::string file = (folder / "exported.json").string();
  EXPECT_THAT(run_program("cache export " + file).out, HasSubstr("4 measurements written"));
  EXPECT_THAT(run_program("cache clear").out, HasSubstr("4 measurements removed"));
  EXPECT_THAT(run_program("cache show").out, HasSubstr("0 measurements"));
  EXPECT_THAT(run_program("cache import " + file).out, HasSubstr("4 measurements added"));
  EXPECT_EQ(run_program("cache show --json").json().at("entries").size(), 4);
}

TEST_F(ProgramTune, ImportOfSomethingElseIsRefused) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "letter.txt") << "Dear cache";
  const ProgramResult result = run_program("cache import " + (folder / "letter.txt").string());
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("not JSON"));
  for (const std::string& unreadable : {folder.string(), (folder / "nothing").string()}) {
    const ProgramResult refused = run_program("cache import " + unreadable);
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.err, HasSubstr("cannot read " + unreadable));
  }
}

/// Neither root nor anybody else makes a folder below a file.
TEST_F(ProgramTune, WhatCannotBeSavedIsSaidAndExitsWithCode3) {
  run_program("tune " + kSmallLayer);
  const std::string exported = folder.string() + ".json";
  run_program("cache export " + exported);
  setenv("MOEGEMM_CACHE_DIR", (exported + "/below").c_str(), 1);
  const ProgramResult imported = run_program("cache import " + exported);
  const ProgramResult tuned = run_program("tune " + kSmallLayer);
  std::filesystem::remove(exported);
  EXPECT_EQ(imported.exit_code, 3);
  EXPECT_THAT(imported.err, HasSubstr("the imported measurements are not saved: cannot create"));
  EXPECT_THAT(imported.out, IsEmpty());
  EXPECT_EQ(tuned.exit_code, 3);
  EXPECT_THAT(tuned.err, HasSubstr("the measurements are not saved: cannot create"));
  EXPECT_THAT(tuned.err, HasSubstr("MOEGEMM_CACHE_DIR can name another folder"));
  EXPECT_THAT(tuned.out, HasSubstr("not kept"));
}

TEST_F(ProgramTune, FullDiskIsSaidAndExitsWithCode3) {
  // A file may have 512 bytes, four entries have more: as on a full disk, the write fails.
  const ProgramResult result =
      run_program("tune " + kSmallLayer + " >/dev/null", "trap '' XFSZ; ulimit -f 1; ");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("the measurements are not saved: cannot write"));
}

TEST_F(ProgramTune, OutputThatCannotBeWrittenExitsWithCode3) {
  const ProgramResult result = run_program("cache show --json > /dev/full");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("cannot write to the standard output"));
}

TEST_F(ProgramTune, BudgetThatTheWarmUpUsesUpIsSaid) {
  const ProgramResult result = run_program(
      "tune --budget 0.01 --tokens 20000 --experts 4 --topk 2 --hidden 512 --intermediate 512");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("the whole budget of 0.01 s"));
  EXPECT_THAT(result.out, ::testing::Not(HasSubstr("known already")));
}

TEST_F(ProgramTune, FolderThatIsNotUtf8IsNamedInTextAndJson) {
  folder += "_caf\xe9";
  setenv("MOEGEMM_CACHE_DIR", folder.c_str(), 1);
  EXPECT_EQ(run_program("tune --json " + kSmallLayer).exit_code, 0);
  const ProgramResult shown = run_program("cache show --json");
  ASSERT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_EQ(shown.json().at("entries").size(), 4);
  EXPECT_THAT(shown.json().at("path").get<std::string>(), HasSubstr("_caf\xef\xbf\xbd/"));
}

TEST_F(ProgramTune, CorruptCacheIsToldOnStderrAndIgnored) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "tuning.json") << "{";
  const ProgramResult result = run_program("cache show");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("0 measurements"));
  EXPECT_THAT(result.err, HasSubstr("is ignored"));
}

}  // namespace
}  // namespace moegemm::test
