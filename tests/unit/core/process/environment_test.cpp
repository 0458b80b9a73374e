#include "core/process/environment.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "moegemm/error.h"
#include "moegemm/execution.h"
#include "unit/core/expect_refusal.h"
#include "unit/core/scoped_environment.h"

namespace moegemm {
namespace {

using testing::expect_refusal;
using testing::ScopedEnvironment;

TEST(Environment, EmptyMeansNotSet) {
  const ScopedEnvironment backend("MOEGEMM_BACKEND", "");
  const ScopedEnvironment check("MOEGEMM_CHECK", "");
  const ScopedEnvironment threads("MOEGEMM_NUM_THREADS", "");
  EXPECT_EQ(environment_backend(), std::nullopt);
  EXPECT_EQ(environment_of_call().backend(), std::nullopt);
  EXPECT_FALSE(environment_of_call().check());
  EXPECT_EQ(environment_num_threads(), std::nullopt);
}

TEST(Environment, BackendIsReadAtEachCall) {
  const ScopedEnvironment first("MOEGEMM_BACKEND", "reference");
  EXPECT_EQ(environment_backend(), BackendKind::kReference);
  const ScopedEnvironment second("MOEGEMM_BACKEND", "sm90");
  EXPECT_EQ(environment_backend(), BackendKind::kSm90);
  EXPECT_EQ(environment_of_call().backend(), BackendKind::kSm90);
}

TEST(Environment, UnknownBackendListsTheAcceptedOnes) {
  const ScopedEnvironment backend("MOEGEMM_BACKEND", "gpu");
  expect_refusal(ErrorKind::kInvalidValue,
                 {"MOEGEMM_BACKEND", "'gpu'", "sm90, sm80, cpu and reference"},
                 [] { environment_backend(); });
  expect_refusal(ErrorKind::kInvalidValue, {"MOEGEMM_BACKEND", "'gpu'"},
                 [] { environment_of_call().backend(); });
}

TEST(Environment, CheckIsZeroOrOne) {
  const ScopedEnvironment on("MOEGEMM_CHECK", "1");
  EXPECT_TRUE(environment_of_call().check());
  const ScopedEnvironment off("MOEGEMM_CHECK", "0");
  EXPECT_FALSE(environment_of_call().check());
  const ScopedEnvironment other("MOEGEMM_CHECK", "maybe");
  expect_refusal(ErrorKind::kInvalidValue, {"MOEGEMM_CHECK", "'maybe'", "0 and 1"},
                 [] { environment_of_call().check(); });
}

TEST(Environment, ThreadCountMustBeAPositiveNumber) {
  const ScopedEnvironment good("MOEGEMM_NUM_THREADS", "3");
  EXPECT_EQ(environment_num_threads(), 3);
  for (const char* word : {"0", "-1", "2x", "many", "4097", "99999999999"}) {
    const ScopedEnvironment bad("MOEGEMM_NUM_THREADS", word);
    expect_refusal(ErrorKind::kInvalidValue, {"MOEGEMM_NUM_THREADS", word, "1 to 4096"},
                   [] { environment_num_threads(); });
  }
}

TEST(Environment, NamesThatMeanNothingAreToldOnce) {
  std::vector<std::string> warnings;
  set_warning_handler([&](const std::string& message) { warnings.push_back(message); });
  const ScopedEnvironment misspelt("MOEGEMM_BACKENT", "cpu");
  const ScopedEnvironment right("MOEGEMM_NUM_THREADS", "2");
  const ScopedEnvironment of_tests("MOEGEMM_TEST_ANYTHING", "1");
  check_environment();
  check_environment();
  set_warning_handler({});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_EQ(warnings[0].rfind("the environment variable MOEGEMM_BACKENT means nothing", 0), 0u);
}

TEST(Environment, LoadEarlyIsZeroOrOne) {
  const ScopedEnvironment empty("MOEGEMM_LOAD_EARLY", "");
  EXPECT_TRUE(loads_early());
  const ScopedEnvironment off("MOEGEMM_LOAD_EARLY", "0");
  EXPECT_FALSE(loads_early());
  const ScopedEnvironment wrong("MOEGEMM_LOAD_EARLY", "banana");
  for (void (*check)() :
       {+[] { static_cast<void>(loads_early()); }, +[] { check_environment(); }}) {
    expect_refusal(ErrorKind::kInvalidValue, {"MOEGEMM_LOAD_EARLY", "'banana'", "0 and 1"}, check);
  }
}

}  // namespace
}  // namespace moegemm
