#include "conformance/driver/targets.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>

#include "moegemm/info.h"

namespace moegemm::testing {
namespace {

class BodyTest : public ::testing::Test {
 public:
  explicit BodyTest(std::function<void()> body) : body_(std::move(body)) {}
  void TestBody() override { body_(); }

 private:
  std::function<void()> body_;
};

bool runs_on_gpu(BackendKind kind) {
  return kind == BackendKind::kSm90 || kind == BackendKind::kSm80;
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> found = [] {
    std::vector<Target> list;
    for (const BackendInfo& info : backends()) {
      if (!info.available) continue;
      std::string why_none;
      Memory* memory = runs_on_gpu(info.kind) ? cuda_memory(&why_none) : &cpu_memory();
      if (memory == nullptr) continue;
      list.push_back({.backend = info.kind,
                      .memory = memory,
                      .may_refuse = info.kind == BackendKind::kSm90,
                      .accuracy = {.double_accumulation = info.kind == BackendKind::kReference,
                                   .rounded_product = info.kind != BackendKind::kReference}});
    }
    return list;
  }();
  return found;
}

const std::vector<RowTarget>& row_targets() {
  static const std::vector<RowTarget> found = [] {
    std::vector<RowTarget> list = {{"cpu", &cpu_memory()}};
    std::string why_none;
    if (Memory* memory = cuda_memory(&why_none)) list.push_back({"cuda", memory});
    return list;
  }();
  return found;
}

void add_test(const std::string& suite, const std::string& name, std::function<void()> body) {
  ::testing::RegisterTest(
      suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
      [body = std::move(body)]() -> ::testing::Test* { return new BodyTest(body); });
}

void add_unavailable_tests() {
  for (const BackendInfo& info : backends()) {
    if (info.available) continue;
    add_test(to_string(info.kind), "Unavailable",
             [info] { GTEST_SKIP() << to_string(info.kind) << ": " << info.reason; });
  }
  std::string why_none;
  if (cuda_memory(&why_none) == nullptr) {
    add_test("cuda", "Unavailable", [why_none] { GTEST_SKIP() << "cuda: " << why_none; });
  }
}

std::int64_t environment_number(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoll(text, nullptr, 0) : otherwise;
}

bool trimmed_run() { return environment_number("MOEGEMM_TEST_TRIM", 0) != 0; }

std::uint64_t run_seed() {
  return static_cast<std::uint64_t>(environment_number("MOEGEMM_TEST_SEED", 20260915));
}

}  // namespace moegemm::testing
