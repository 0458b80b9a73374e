#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "cpu/simd/memory/huge_page_record.h"
#include "cpu/simd/memory/output_pages.h"
#include "moegemm/ops.h"

namespace moegemm::cpu::simd {
namespace {

using namespace std::chrono_literals;

constexpr int kPages = 14;

void touch(HugePageRecord& record, int times, HugePageRecord::Clock::duration each) {
  for (int i = 0; i < times; ++i) record.touched(kPages, kPages * each);
}

TEST(HugePageRecord, AsksForHugePagesUntilManyInARowWereSlow) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  EXPECT_TRUE(record.worthwhile(kPages));
  touch(record, 1, 4ms);
  EXPECT_FALSE(record.worthwhile(kPages));
}

TEST(HugePageRecord, FastPagesEndARowOfSlowOnes) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  touch(record, 1, 170us);
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  EXPECT_TRUE(record.worthwhile(kPages));
}

TEST(HugePageRecord, PagesThatWereThereAlreadySayNothing) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  touch(record, 3, 1us);
  touch(record, 1, 4ms);
  EXPECT_FALSE(record.worthwhile(kPages));
}

TEST(HugePageRecord, TriesAgainAfterAWhile) {
  HugePageRecord record;
  for (int time = 0; time < 2; ++time) {
    touch(record, HugePageRecord::kSlowInARow, 4ms);
    for (int i = 0; i < HugePageRecord::kFreshWithout; ++i) {
      EXPECT_FALSE(record.worthwhile(kPages));
      record.went_without(kPages);
    }
    EXPECT_TRUE(record.worthwhile(kPages));
  }
}

TEST(HugePageRecord, SizesAreApart) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow, 4ms);
  EXPECT_FALSE(record.worthwhile(kPages - 1));
  EXPECT_TRUE(record.worthwhile(2 * kPages));
  EXPECT_TRUE(record.worthwhile(kPages / 2));
}

constexpr std::int64_t kSmallPage = 4096;
constexpr std::int64_t kHugePage = 2 << 20;

/// Fresh pages that begin at a huge page.
class Mapping {
 public:
  explicit Mapping(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes + kHugePage)) {
    whole_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    const auto address = reinterpret_cast<std::uintptr_t>(whole_);
    data = static_cast<char*>(whole_) + (kHugePage - address % kHugePage) % kHugePage;
  }
  ~Mapping() { munmap(whole_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void make_read_only(std::int64_t offset, std::int64_t bytes) const {
    ASSERT_EQ(mprotect(data + offset, static_cast<std::size_t>(bytes), PROT_READ), 0);
  }
  bool present(std::int64_t offset) const {
    unsigned char resident = 0;
    return mincore(data + offset, 1, &resident) == 0 && (resident & 1) != 0;
  }

  char* data = nullptr;

 private:
  void* whole_ = nullptr;
  std::size_t bytes_ = 0;
};

TEST(OutputPages, KeepWhatIsInTheBuffer) {
  std::vector<char> buffer(std::size_t{9} << 20);
  for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<char>(i % 251);
  const std::vector<char> before = buffer;
  const auto bytes = static_cast<std::int64_t>(buffer.size()) - 1;
  prepare_output_pages({buffer.data() + 1, 1, bytes, bytes}, {});
  EXPECT_TRUE(std::equal(before.begin(), before.end(), buffer.begin()));
}

TEST(OutputPages, LastRowEndsWhereItsColumnsEnd) {
  constexpr std::int64_t kPitch = 4 << 20;
  constexpr std::int64_t kRow = 128;
  const Mapping mapping(4 * kPitch);
  mapping.make_read_only(3 * kPitch, kPitch);
  // The last columns of three rows: what follows them in memory may not be written.
  prepare_output_pages({mapping.data + kPitch - kRow, 3, kRow, kPitch}, {});
  for (std::int64_t r = 0; r < 3; ++r) EXPECT_FALSE(mapping.present(r * kPitch));
}

TEST(OutputPages, BetweenRowsNothingIsWritten) {
  constexpr std::int64_t kRows = 2048;
  constexpr std::int64_t kPitch = 2 * kSmallPage;
  const Mapping mapping(kRows * kPitch);
  // Huge pages begin in a gap that must stay as it is.
  const std::int64_t first = kSmallPage;
  for (std::int64_t r = 0; r < kRows; r += 16) mapping.make_read_only(r * kPitch, kSmallPage);
  prepare_output_pages({mapping.data + first, kRows, kSmallPage, kPitch}, {});
  for (std::int64_t r = 0; r < kRows; r += 16) EXPECT_FALSE(mapping.present(r * kPitch));
}

TEST(OutputPages, ProductsIntoTheLastColumnsOfWideRowsStayInsideThem) {
  constexpr std::int64_t kPitch = 4 << 20;
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kCols = 32;
  const Mapping mapping((kRows + 1) * kPitch);
  mapping.make_read_only(kRows * kPitch, kPitch);
  std::vector<float> ones(kCols * kCols, 1);
  std::vector<std::int32_t> m_sizes = {kRows};
  const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
    return TensorView::matrix(ones.data(), DType::kFloat32, rows, cols);
  };
  char* const out = mapping.data + kPitch - kCols * std::int64_t{sizeof(float)};
  const std::int64_t stride = kPitch / std::int64_t{sizeof(float)};
  const TensorView rows = TensorView::matrix(out, DType::kFloat32, kRows, kCols, stride);
  const TensorView w = TensorView::stack(ones.data(), DType::kFloat32, 1, kCols, kCols);
  const RoutingView routing = {TensorView::vector(m_sizes.data(), DType::kInt32, 1), {}, {}, 1};
  const auto last = [&] { return reinterpret_cast<float*>(out)[2 * stride + kCols - 1]; };
  forward(matrix(kRows, kCols), w, rows, routing, {}, {});
  EXPECT_EQ(last(), kCols);
  backward_dx(matrix(kRows, kCols), w, rows, routing, {}, {});
  EXPECT_EQ(last(), kCols);
  TensorView dw = TensorView::stack(out, DType::kFloat32, 1, kRows, kCols);
  dw.row_stride = stride;
  backward_dw(matrix(kRows, kRows), matrix(kRows, kCols), dw, routing, {}, {});
  EXPECT_EQ(last(), kRows);
}

}  // namespace
}  // namespace moegemm::cpu::simd
