#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/backend.h"
#include "cpu/simd/isa/instruction_set.h"
#include "moegemm/quantization.h"

/// Operands end where their pages do, and the next page faults: whoever reads or writes past the
/// last element of any of them ends this program.
namespace moegemm::cpu::simd {
namespace {

class PageEnd {
 public:
  explicit PageEnd(std::int64_t bytes)
      : page_(sysconf(_SC_PAGESIZE)), size_((bytes + page_ - 1) / page_ * page_ + page_) {
    map_ = static_cast<char*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED || mprotect(map_ + size_ - page_, page_, PROT_NONE) != 0) std::abort();
    data_ = map_ + size_ - page_ - bytes;
    for (std::int64_t i = 0; i < bytes; ++i) data_[i] = static_cast<char>(i % 7 + 0x30);
  }
  ~PageEnd() { munmap(map_, size_); }
  PageEnd(const PageEnd&) = delete;
  PageEnd& operator=(const PageEnd&) = delete;

  char* data() const { return data_; }

 private:
  std::int64_t page_, size_;
  char* map_;
  char* data_;
};

struct Shape {
  std::int64_t n, k, gap;
};

/// Of `rows` rows, `stride` elements apart, the last ends with its last element.
std::int64_t span_bytes(std::int64_t rows, std::int64_t cols, std::int64_t stride, DType dtype) {
  return ((rows - 1) * stride + cols) * size_bytes(dtype);
}

void run_at_page_ends(const Problem& base, const Shape& shape, const std::vector<std::int32_t>& m) {
  Problem problem = base;
  problem.n = shape.n;
  problem.k = shape.k;
  problem.experts = static_cast<std::int64_t>(m.size());
  problem.rows = 0;
  for (const std::int32_t size : m) problem.rows += size;
  const DType dtype = problem.dtype;
  const bool packed = !problem.quantization.plain();
  const std::int64_t e = problem.experts, rows = problem.rows;
  const std::int64_t x_stride = shape.k + shape.gap, dy_stride = shape.n + shape.gap;
  const std::int64_t w_stride = packed ? shape.k : x_stride;
  const std::int64_t out_cols = problem.op == Op::kForward ? shape.n : shape.k;
  const std::int64_t out_rows = problem.op == Op::kDw ? e * shape.n : rows;
  const PageEnd x(span_bytes(rows, shape.k, x_stride, dtype));
  const PageEnd dy(span_bytes(rows, shape.n, dy_stride, dtype));
  const PageEnd w(packed ? e * problem.quantization.expert_bytes(shape.n, shape.k)
                         : span_bytes(e * shape.n, shape.k, w_stride, dtype));
  const PageEnd scales(e * problem.quantization.expert_scales(shape.n, shape.k) *
                       scale_bytes(problem.quantization.scale_type));
  const PageEnd sizes(e * std::int64_t{sizeof(m[0])});
  const PageEnd out(span_bytes(out_rows, out_cols, out_cols + shape.gap, problem.out_dtype));
  std::memcpy(sizes.data(), m.data(), m.size() * sizeof(m[0]));
  Operands operands;
  operands.x = x.data();
  operands.dy = dy.data();
  operands.w = w.data();
  operands.w_scales = packed ? scales.data() : nullptr;
  operands.out = out.data();
  operands.x_stride = x_stride;
  operands.w_stride = w_stride;
  operands.dy_stride = dy_stride;
  operands.out_stride = out_cols + shape.gap;
  operands.m_sizes = sizes.data();
  for (const InstructionSet isa : usable_instruction_sets()) {
    const Backend& backend = backend_for(isa);
    for (std::size_t i = 0; i < backend.kernels().size(); ++i) {
      if (!backend.refuse(problem, backend.kernels()[i]).empty()) continue;
      backend.launch(backend.plan_with(problem, static_cast<int>(i)), problem, operands, {});
    }
  }
}

constexpr Shape kShapes[] = {{1, 1, 0},   {3, 7, 1},    {5, 33, 0},    {17, 65, 3},
                             {64, 64, 0}, {66, 130, 5}, {129, 257, 0}, {12, 1030, 1}};

TEST(PageEnds, PlainOperandsAreNotReadOrWrittenPastTheirLastElement) {
  for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const Shape& shape : kShapes) {
        Problem problem;
        problem.op = op;
        problem.dtype = problem.out_dtype = dtype;
        run_at_page_ends(problem, shape, {1, 0, 2, 5, 13, 26});
        run_at_page_ends(problem, shape, {1});
        problem.out_dtype = DType::kFloat32;
        problem.accumulate = op == Op::kDw;
        run_at_page_ends(problem, shape, {3, 7});
      }
    }
  }
}

TEST(PageEnds, QuantisedWeightsAreNotReadPastTheirLastByteOrScale) {
  struct Format {
    const char* name;
    ScaleType scale_type;
    std::int64_t group;
  };
  constexpr Format kFormats[] = {
      {"mxfp4", ScaleType::kE8m0, 32},         {"int4/32", ScaleType::kBFloat16, 32},
      {"int4/128", ScaleType::kFloat16, 128},  {"nf4/64", ScaleType::kFloat32, 1},
      {"fp8/128x128", ScaleType::kFloat32, 1}, {"fp8/channel", ScaleType::kBFloat16, 1},
      {"fp8/tensor", ScaleType::kFloat32, 1},
  };
  for (const Format& format : kFormats) {
    for (const Op op : {Op::kForward, Op::kDx}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        for (Shape shape : kShapes) {
          shape.k = (shape.k + format.group - 1) / format.group * format.group;
          Problem problem;
          problem.op = op;
          problem.dtype = problem.out_dtype = dtype;
          problem.quantization =
              parse_quantization(format.name, format.scale_type, shape.n, shape.k);
          run_at_page_ends(problem, shape, {1, 0, 2, 3, 4, 5, 13, 26});
          run_at_page_ends(problem, shape, {1});
        }
      }
    }
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
