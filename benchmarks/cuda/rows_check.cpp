#include "rows_check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <string>

#include "core/registry.h"
#include "tensor_pair.h"

namespace moegemm::cuda {
namespace {

using Random = std::mt19937_64;

template <typename T>
T pick(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

bool coin(Random& random) { return random() % 2 == 0; }

DType pick_float(Random& random) {
  return pick(random, {DType::kBFloat16, DType::kFloat16, DType::kFloat32});
}
DType pick_index(Random& random) { return coin(random) ? DType::kInt32 : DType::kInt64; }

/// Relative size of one rounding.
double rounding(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

int report(const char* what, int cases, int failures) {
  std::printf("%-12s %4d cases, %d failed\n", what, cases, failures);
  return failures;
}

/// Two results that are both within `slack` of the exact value before their one rounding.
bool agree(float a, float b, double slack, DType dtype) {
  const double bound =
      2 * slack + 2 * rounding(dtype) * std::max(std::abs(a), std::abs(b)) + 0x1p-24;
  return std::abs(static_cast<double>(a) - b) <= bound;  // false for NaN
}

}  // namespace

int check_route(int cases, unsigned long long seed) {
  Random random(seed);
  int failures = 0;
  for (int i = 0; i < cases; ++i) {
    const std::int64_t topk = pick<std::int64_t>(random, {1, 2, 4, 6, 8, 10});
    const std::int64_t tokens =
        pick<std::int64_t>(random, {0, 1, 3, 64, 511, 512, 513, 1000, 8192, 20001});
    const std::int64_t experts =
        pick<std::int64_t>(random, {1, 2, 8, 31, 128, 255, 256, 512, 1024, 4000, 5000, 70000});
    const int spread = static_cast<int>(random() % 4);  // all one expert ... some ids out of range
    TensorPair ids(pick_index(random), tokens, topk, coin(random) ? 3 : 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t s = 0; s < topk; ++s) {
        const auto any = static_cast<std::int64_t>(random() % static_cast<unsigned long>(experts));
        const std::int64_t id =
            spread == 0   ? experts - 1
            : spread == 1 ? any * any / experts
            : spread == 2 && random() % 3 == 0
                ? pick<std::int64_t>(random, {-1, experts, INT32_MIN, INT32_MAX})
                : any;
        ids.set_index(t, s, id);
      }
    }
    if (ids.dtype() == DType::kInt64 && tokens > 0 && spread == 2) {
      ids.set_index(0, 0, std::int64_t{1} << 32);  // low half is a good id
    }
    ids.upload();
    const DType out = pick_index(random);
    const std::int64_t rows = tokens * topk;
    TensorPair sizes(out, experts, 1), indices(out, rows, 1), inverse(out, rows, 1);
    const bool want_inverse = coin(random);
    MirroredBytes workspace(
        static_cast<std::size_t>(cuda_row_kernels().route_workspace_bytes(rows, experts)), 0xa5);
    cpu_row_kernels().route(ids.matrix(), experts, sizes.vector(), indices.vector(),
                            want_inverse ? inverse.vector() : TensorView{}, nullptr, {});
    cuda_row_kernels().route(
        ids.device_matrix(), experts, sizes.device_vector(), indices.device_vector(),
        want_inverse ? inverse.device_vector() : TensorView{}, workspace.device(), {});
    check(cudaDeviceSynchronize(), "run route");
    if (!sizes.identical() || !indices.identical() || !inverse.identical()) {
      ++failures;
      std::printf("route differs: T %ld topk %ld E %ld ids %s out %s spread %d inverse %d\n",
                  static_cast<long>(tokens), static_cast<long>(topk), static_cast<long>(experts),
                  to_string(ids.dtype()), to_string(out), spread, want_inverse);
    }
  }
  return report("route", cases, failures);
}

int check_combine(int cases, unsigned long long seed) {
  Random random(seed);
  int failures = 0;
  for (int i = 0; i < cases; ++i) {
    const std::int64_t topk = pick<std::int64_t>(random, {1, 2, 3, 4, 6, 8, 9, 17});
    const std::int64_t tokens = pick<std::int64_t>(random, {0, 1, 5, 64, 301});
    const std::int64_t cols = pick<std::int64_t>(random, {1, 7, 8, 24, 100, 512, 2050});
    const DType dtype = pick_float(random);
    const DType out_dtype = coin(random) ? dtype : DType::kFloat32;
    const std::int64_t lead = pick<std::int64_t>(random, {0, 0, 1, 8});
    const std::int64_t pad = coin(random) ? (8 - cols % 8) % 8 : random() % 9;
    TensorPair rows(dtype, tokens * topk, cols, pad, lead);
    rows.fill_normal(random);
    TensorPair weights(coin(random) ? dtype : DType::kFloat32, tokens * topk, 1);
    weights.fill_normal(random);
    const bool weighted = random() % 3 != 0;
    TensorPair out(out_dtype, tokens, cols, pad, lead);
    cpu_row_kernels().combine(rows.matrix(), weighted ? weights.vector() : TensorView{}, topk,
                              out.matrix(), {});
    cuda_row_kernels().combine(rows.device_matrix(),
                               weighted ? weights.device_vector() : TensorView{}, topk,
                               out.device_matrix(), {});
    check(cudaDeviceSynchronize(), "run combine");
    const auto got = out.download();
    bool good = true;
    for (std::int64_t t = 0; t < tokens && good; ++t) {
      for (std::int64_t c = 0; c < cols && good; ++c) {
        double magnitude = 0;
        for (std::int64_t s = 0; s < topk; ++s) {
          const double weight = weighted ? weights.value(t * topk + s) : 1.0;
          magnitude += std::abs(weight * rows.value(t * topk + s, c));
        }
        good = agree(out.value(t, c), out.value_in(got.data(), t, c),
                     static_cast<double>(topk + 1) * 0x1p-24 * magnitude, out_dtype);
        out.set_value(t, c, out.value_in(got.data(), t, c));
      }
    }
    // The elements are the GPU's now: what may still differ is the padding.
    if (!good || !out.identical()) {
      ++failures;
      std::printf("combine differs%s: T %ld topk %ld C %ld pad %ld lead %ld %s -> %s weights %s\n",
                  good ? " in the padding" : "", static_cast<long>(tokens), static_cast<long>(topk),
                  static_cast<long>(cols), static_cast<long>(pad), static_cast<long>(lead),
                  to_string(dtype), to_string(out_dtype),
                  weighted ? to_string(weights.dtype()) : "none");
    }
  }
  return report("combine", cases, failures);
}

int check_scale_rows(int cases, unsigned long long seed) {
  Random random(seed);
  int failures = 0;
  for (int i = 0; i < cases; ++i) {
    const std::int64_t rows = pick<std::int64_t>(random, {0, 1, 7, 64, 300, 5000});
    const std::int64_t cols = pick<std::int64_t>(random, {1, 8, 33, 256, 776, 2048});
    const std::int64_t experts = pick<std::int64_t>(random, {1, 3, 8, 300});
    const std::int64_t lead = pick<std::int64_t>(random, {0, 0, 1, 8});
    const std::int64_t pad = coin(random) ? (8 - cols % 8) % 8 : random() % 9;
    const DType x_dtype = pick_float(random);
    const DType product_dtype = random() % 3 == 0 ? pick_float(random) : x_dtype;
    TensorPair product(product_dtype, rows, cols, pad, lead), x(x_dtype, rows, cols, pad, lead);
    product.fill_normal(random);
    x.fill_normal(random);
    TensorPair weights(coin(random) ? x_dtype : DType::kFloat32, rows, 1);
    weights.fill_normal(random);
    TensorPair sizes(pick_index(random), experts, 1), indices(pick_index(random), rows, 1);
    for (std::int64_t e = 0; e < experts; ++e) {
      // Some negative; the sum ends before or beyond the rows.
      sizes.set_index(e, 0, static_cast<std::int64_t>(random() % (2 * rows / experts + 2)) - 1);
    }
    std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
    for (std::int64_t r = 0; r < rows; ++r) order[static_cast<std::size_t>(r)] = r;
    std::shuffle(order.begin(), order.end(), random);
    for (std::int64_t r = 0; r < rows; ++r) {
      const bool bad = random() % 50 == 0;
      indices.set_index(r, 0,
                        bad ? pick<std::int64_t>(random, {-1, rows, INT32_MIN, INT32_MAX})
                            : order[static_cast<std::size_t>(r)]);
    }
    sizes.upload();
    indices.upload();
    const bool in_place = coin(random), want_x = coin(random);
    TensorPair separate(coin(random) ? product_dtype : pick_float(random), rows, cols, pad, lead);
    TensorPair& scaled = in_place ? product : separate;
    TensorPair scaled_x(coin(random) ? x_dtype : pick_float(random), rows, cols, pad, lead);
    TensorPair dot(coin(random) ? x_dtype : DType::kFloat32, rows, 1);
    std::vector<double> magnitude(static_cast<std::size_t>(rows), 0.0);  // of each dot, flat order
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t flat = indices.index(r);
      for (std::int64_t c = 0; flat >= 0 && flat < rows && c < cols; ++c) {
        magnitude[static_cast<std::size_t>(flat)] +=
            std::abs(static_cast<double>(product.value(r, c)) * x.value(r, c));
      }
    }
    const RoutingView host = {sizes.vector(), indices.vector(), weights.vector(), 1};
    const RoutingView device = {sizes.device_vector(), indices.device_vector(),
                                weights.device_vector(), 1};
    cpu_row_kernels().scale_rows(product.matrix(), x.matrix(), host, scaled.matrix(), dot.vector(),
                                 want_x ? scaled_x.matrix() : TensorView{}, {});
    cuda_row_kernels().scale_rows(product.device_matrix(), x.device_matrix(), device,
                                  scaled.device_matrix(), dot.device_vector(),
                                  want_x ? scaled_x.device_matrix() : TensorView{}, {});
    check(cudaDeviceSynchronize(), "run scale_rows");
    const auto got = dot.download();
    bool dots_good = true;
    for (std::int64_t r = 0; r < rows; ++r) {
      dots_good &=
          agree(dot.value(r), dot.value_in(got.data(), r),
                static_cast<double>(cols + 1) * 0x1p-24 * magnitude[static_cast<std::size_t>(r)],
                dot.dtype());
    }
    const bool scaled_good = scaled.identical() && scaled_x.identical();
    if (!dots_good || !scaled_good) {
      ++failures;
      std::printf(
          "scale_rows differs (%s%s): M %ld K %ld E %ld pad %ld lead %ld product %s x %s "
          "scaled %s in_place %d scaled_x %d dot %s\n",
          dots_good ? "" : "dot ", scaled_good ? "" : "scaled", static_cast<long>(rows),
          static_cast<long>(cols), static_cast<long>(experts), static_cast<long>(pad),
          static_cast<long>(lead), to_string(product_dtype), to_string(x_dtype),
          to_string(scaled.dtype()), in_place, want_x, to_string(dot.dtype()));
    }
  }
  return report("scale_rows", cases, failures);
}

int check_faults(int cases, unsigned long long seed) {
  Random random(seed);
  int failures = 0;
  for (int i = 0; i < cases; ++i) {
    const std::int64_t rows = pick<std::int64_t>(random, {0, 1, 100, 5000, 300000});
    const std::int64_t experts = pick<std::int64_t>(random, {1, 8, 255, 256, 257, 1024, 3000});
    TensorPair sizes(pick_index(random), experts, 1), indices(pick_index(random), rows, 1);
    for (std::int64_t e = 0; e < experts; ++e) sizes.set_index(e, 0, rows / experts);
    for (std::int64_t r = 0; r < rows; ++r) indices.set_index(r, 0, rows - 1 - r);
    const auto expert = [&] { return static_cast<std::int64_t>(random() % experts); };
    const int fault = static_cast<int>(random() % 4);
    for (int n = static_cast<int>(random() % 3); n >= 0; --n) {
      if (fault == 1) sizes.set_index(expert(), 0, -7);
      if (fault == 2) {
        sizes.set_index(expert(), 0,
                        sizes.dtype() == DType::kInt64 && coin(random) ? INT64_MAX : rows + 5);
      }
      if (fault == 3 && rows > 0) {
        indices.set_index(static_cast<std::int64_t>(random() % rows), 0, coin(random) ? -1 : rows);
      }
    }
    sizes.upload();
    indices.upload();
    const bool with_indices = coin(random);
    const RoutingView host = {
        sizes.vector(), with_indices ? indices.vector() : TensorView{}, {}, 1};
    const RoutingView device = {
        sizes.device_vector(), with_indices ? indices.device_vector() : TensorView{}, {}, 1};
    const auto want = cpu_row_kernels().check(host, rows, {});
    const auto got = cuda_row_kernels().check(device, rows, {});
    const bool same = want.has_value() == got.has_value() &&
                      (!want || (want->what == got->what && want->position == got->position &&
                                 want->value == got->value));
    if (!same) {
      ++failures;
      std::printf(
          "check differs: M %ld E %ld fault %d indices %d: CPU %d at %ld (%ld), GPU %d at "
          "%ld (%ld)\n",
          static_cast<long>(rows), static_cast<long>(experts), fault, with_indices,
          want ? static_cast<int>(want->what) : -1, want ? static_cast<long>(want->position) : 0,
          want ? static_cast<long>(want->value) : 0, got ? static_cast<int>(got->what) : -1,
          got ? static_cast<long>(got->position) : 0, got ? static_cast<long>(got->value) : 0);
    }
  }
  return report("check", cases, failures);
}

}  // namespace moegemm::cuda
