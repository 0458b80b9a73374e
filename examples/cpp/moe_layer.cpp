// The forward pass of a small Mixture-of-Experts layer on the CPU: route the tokens, multiply each
// by the two matrices of its experts, add up. The result is compared with plain loops.
#include <moegemm/moegemm.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

using moegemm::DType;
using moegemm::TensorView;

constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kTopk = 2;  // experts per token
constexpr std::int64_t kTokens = 6;
constexpr std::int64_t kHidden = 32;        // width of a token
constexpr std::int64_t kIntermediate = 48;  // width inside an expert
constexpr std::int64_t kRows = kTokens * kTopk;

std::vector<float> random_values(std::int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = uniform(random);
  return values;
}

float relu(float value) { return std::max(value, 0.0F); }

// What a router hands over: for each token the ids of its experts and how much each one counts.
struct Router {
  std::vector<std::int32_t> expert_ids = {0, 2, 2, 1, 3, 0, 2, 3, 0, 1, 2, 0};  // [tokens, topk]
  std::vector<float> weights = {0.7F, 0.3F, 0.6F, 0.4F, 0.5F, 0.5F,
                                0.9F, 0.1F, 0.8F, 0.2F, 0.4F, 0.6F};  // [tokens, topk]
};

struct Layer {
  std::vector<float> up;    // [experts, intermediate, hidden]
  std::vector<float> down;  // [experts, hidden, intermediate]
};

// The layer through moegemm. Tensors are views: this program owns all memory.
std::vector<float> moe_layer(const std::vector<float>& tokens, const Layer& layer,
                             const Router& router) {
  // 1. Sort the rows by expert: m_sizes[e] rows go to expert e, and gather_indices[r] says which
  //    (token, slot) the r-th of them is.
  std::vector<std::int32_t> m_sizes(kExperts);
  std::vector<std::int32_t> gather_indices(kRows);
  moegemm::RoutingView routing;
  routing.m_sizes = TensorView::vector(m_sizes.data(), DType::kInt32, kExperts);
  routing.gather_indices = TensorView::vector(gather_indices.data(), DType::kInt32, kRows);
  routing.router_weights = TensorView::vector(router.weights.data(), DType::kFloat32, kRows);
  routing.topk = kTopk;
  moegemm::route(TensorView::matrix(router.expert_ids.data(), DType::kInt32, kTokens, kTopk),
                 kExperts, routing.m_sizes, routing.gather_indices);

  // 2. First product. permute_x: the tokens are read where they are, no sorted copy is made.
  std::vector<float> inner(kRows * kIntermediate);
  moegemm::GemmOptions first;
  first.permute_x = true;
  const moegemm::Plan plan = moegemm::forward(
      TensorView::matrix(tokens.data(), DType::kFloat32, kTokens, kHidden),
      TensorView::stack(layer.up.data(), DType::kFloat32, kExperts, kIntermediate, kHidden),
      TensorView::matrix(inner.data(), DType::kFloat32, kRows, kIntermediate), routing, first);
  std::printf("first product ran as: %s\n", to_string(plan).c_str());

  // A ReLU between the products, which this program applies itself. For SwiGLU and the others of
  // moegemm/epilogue.h there is GemmOptions::activation.
  std::transform(inner.begin(), inner.end(), inner.begin(), relu);

  // 3. Second product. permute_y: rows are stored back in token order; multiply: each is multiplied
  //    by its router weight on the way.
  std::vector<float> outer(kRows * kHidden);
  moegemm::GemmOptions second;
  second.permute_y = true;
  second.multiply = true;
  moegemm::forward(
      TensorView::matrix(inner.data(), DType::kFloat32, kRows, kIntermediate),
      TensorView::stack(layer.down.data(), DType::kFloat32, kExperts, kHidden, kIntermediate),
      TensorView::matrix(outer.data(), DType::kFloat32, kRows, kHidden), routing, second);

  // 4. Add up the rows of each token. They are weighted already, so no weights are given here.
  std::vector<float> result(kTokens * kHidden);
  moegemm::combine(TensorView::matrix(outer.data(), DType::kFloat32, kRows, kHidden), {}, kTopk,
                   TensorView::matrix(result.data(), DType::kFloat32, kTokens, kHidden));
  return result;
}

// The same layer, token by token.
std::vector<double> plain_layer(const std::vector<float>& tokens, const Layer& layer,
                                const Router& router) {
  std::vector<double> result(kTokens * kHidden, 0.0);
  for (std::int64_t row = 0; row < kRows; ++row) {
    const std::int64_t token = row / kTopk;
    const std::int64_t expert = router.expert_ids[static_cast<std::size_t>(row)];
    const float* x = &tokens[static_cast<std::size_t>(token * kHidden)];
    std::vector<double> inner(kIntermediate, 0.0);
    for (std::int64_t i = 0; i < kIntermediate; ++i) {
      const float* w = &layer.up[static_cast<std::size_t>((expert * kIntermediate + i) * kHidden)];
      for (std::int64_t h = 0; h < kHidden; ++h) inner[i] += double{x[h]} * w[h];
      inner[i] = std::max(inner[i], 0.0);
    }
    for (std::int64_t h = 0; h < kHidden; ++h) {
      const float* w =
          &layer.down[static_cast<std::size_t>((expert * kHidden + h) * kIntermediate)];
      double sum = 0;
      for (std::int64_t i = 0; i < kIntermediate; ++i) sum += inner[i] * w[i];
      result[token * kHidden + h] += double{router.weights[static_cast<std::size_t>(row)]} * sum;
    }
  }
  return result;
}

}  // namespace

int main() {
  try {
    std::printf("moegemm %s\n", moegemm::version().c_str());
    std::mt19937 random(1);
    const std::vector<float> tokens = random_values(kTokens * kHidden, random);
    const Layer layer = {random_values(kExperts * kIntermediate * kHidden, random),
                         random_values(kExperts * kHidden * kIntermediate, random)};
    const Router router;

    const std::vector<float> result = moe_layer(tokens, layer, router);
    const std::vector<double> expected = plain_layer(tokens, layer, router);
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < result.size(); ++i) {
      error += (result[i] - expected[i]) * (result[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    const double relative = std::sqrt(error / norm);
    std::printf("relative error against plain loops in double: %.1e\n", relative);
    if (!(relative < 1e-5)) {
      std::fprintf(stderr, "the result is wrong\n");
      return 1;
    }
    std::printf("token 0: %.4f %.4f %.4f ...\n", result[0], result[1], result[2]);
    return 0;
  } catch (const moegemm::Error& error) {
    std::fprintf(stderr, "moegemm refused: %s\n", error.what());
    return 1;
  }
}
