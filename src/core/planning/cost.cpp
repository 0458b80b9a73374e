#include "core/planning/cost.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moegemm {
namespace {

double round_up(double value, double step) { return std::ceil(value / step) * step; }

/// Experts that get a row when every row picks one at random.
double touched_experts(const Problem& problem) {
  const auto experts = static_cast<double>(problem.experts);
  const auto rows = static_cast<double>(problem.planned_rows());
  return experts * -std::expm1(rows * std::log1p(-1 / std::max(experts, 1 + 1e-9)));
}

/// The sizes of random segments scatter around their mean by its root: five equally likely ones, in
/// standard deviations. An average of 256 rows is not two tiles of 128 but often three.
constexpr std::array kSpread = {-1.40, -0.53, 0.0, 0.53, 1.40};

/// Tensor cores take this many rows at once, at least, whatever a tile holds.
constexpr double kRowGranule = 16;

struct TileWork {
  double tiles = 0;
  double padded_flops = 0;
  double loaded_elems = 0;
};

/// Forward and dX: an expert's rows are cut into tiles of nearly equal size.
TileWork row_work(const Problem& problem, const TileShape& tile) {
  const bool forward = problem.op == Op::kForward;
  const auto columns = static_cast<double>(forward ? problem.n : problem.k);
  const double depth = round_up(static_cast<double>(forward ? problem.k : problem.n), tile.depth);
  const double touched = touched_experts(problem);
  const double mean = static_cast<double>(problem.planned_rows()) / std::max(touched, 1.0);
  const double column_tiles = std::ceil(columns / tile.columns);
  // Packed values take less than the elements that they are decoded to.
  const double packed =
      problem.quantization.plain()
          ? 1
          : problem.quantization.bits() / (8.0 * static_cast<double>(size_bytes(problem.dtype)));
  TileWork work;
  for (const double deviation : kSpread) {
    const double rows = std::max(1.0, mean + deviation * std::sqrt(mean));
    const double row_tiles = std::ceil(rows / tile.rows);
    const double tile_rows =
        round_up(rows / row_tiles, std::min<double>(kRowGranule, std::max(tile.rows, 1)));
    const double tiles = touched / kSpread.size() * row_tiles * column_tiles;
    work.tiles += tiles;
    work.padded_flops += tiles * 2 * tile_rows * tile.columns * depth;
    work.loaded_elems += tiles * (tile_rows + tile.columns * packed) * depth;
  }
  return work;
}

/// dW: every expert has the same tiles, and those of empty ones are only stored.
TileWork weight_work(const Problem& problem, const TileShape& tile) {
  const double touched = touched_experts(problem);
  const double mean = static_cast<double>(problem.planned_rows()) / std::max(touched, 1.0);
  const double per_expert = std::ceil(static_cast<double>(problem.n) / tile.rows) *
                            std::ceil(static_cast<double>(problem.k) / tile.columns);
  const double depth = round_up(std::max(mean, 1.0), std::max(tile.depth, 1));
  TileWork work;
  work.tiles = static_cast<double>(problem.experts) * per_expert;
  work.padded_flops = touched * per_expert * 2 * tile.rows * tile.columns * depth;
  work.loaded_elems = touched * per_expert * (tile.rows + tile.columns) * depth;
  return work;
}

/// Of an expert's W as it is stored.
double weight_bytes(const Problem& problem) {
  const Quantization& quantization = problem.quantization;
  if (!quantization.plain()) {
    return static_cast<double>(quantization.stored_bytes(problem.n, problem.k));
  }
  return static_cast<double>(problem.n) * static_cast<double>(problem.k) *
         static_cast<double>(size_bytes(problem.dtype));
}

double compulsory_bytes(const Problem& problem) {
  const auto element = static_cast<double>(size_bytes(problem.dtype));
  const auto out_element = static_cast<double>(size_bytes(problem.out_dtype));
  const auto rows = static_cast<double>(problem.planned_rows());
  const auto n = static_cast<double>(problem.n);
  const auto k = static_cast<double>(problem.k);
  const auto columns = static_cast<double>(problem.output_columns());
  const auto out_rows = static_cast<double>(problem.output_rows());
  const double x_rows = problem.gathers_x() ? static_cast<double>(problem.tokens()) : rows;
  const double dy_rows = problem.dy_per_token ? static_cast<double>(problem.tokens()) : rows;
  switch (problem.op) {
    case Op::kForward:
      return touched_experts(problem) * weight_bytes(problem) + x_rows * k * element +
             out_rows * columns * out_element;
    case Op::kDx:
      return touched_experts(problem) * weight_bytes(problem) + dy_rows * n * element +
             out_rows * columns * out_element;
    case Op::kDw:
      break;
  }
  const double written = static_cast<double>(problem.experts) * n * k * out_element;
  return (x_rows * k + dy_rows * n) * element + written * (problem.accumulate ? 2 : 1);
}

}  // namespace

const char* CostEstimate::limit() const {
  if (memory_us >= compute_us && memory_us >= tile_load_us) return "memory";
  return compute_us >= tile_load_us ? "compute" : "tile loads";
}

CostEstimate estimate_cost(const Problem& problem, const KernelInfo& kernel,
                           const MachineLimits& limits) {
  CostEstimate cost;
  cost.flops = problem.flops();
  cost.bytes = compulsory_bytes(problem);
  if (limits.flops_per_second <= 0 || limits.bytes_per_second <= 0) return cost;
  const TileWork work =
      problem.op == Op::kDw ? weight_work(problem, kernel.tile) : row_work(problem, kernel.tile);
  cost.tiles = work.tiles;
  cost.waves = work.tiles / std::max(limits.units, 1);
  // The last wave is as long as the others, however few tiles it has.
  const double idle = cost.waves > 0 ? std::ceil(cost.waves) / cost.waves : 1;
  cost.compute_us = work.padded_flops * idle / limits.flops_per_second * 1e6;
  cost.memory_us = cost.bytes / limits.bytes_per_second * 1e6;
  if (limits.tile_bytes_per_second > 0) {
    const auto element = static_cast<double>(size_bytes(problem.dtype));
    cost.tile_load_us = work.loaded_elems * element * idle / limits.tile_bytes_per_second * 1e6;
  }
  cost.total_us = std::max({cost.compute_us, cost.memory_us, cost.tile_load_us}) + limits.launch_us;
  return cost;
}

}  // namespace moegemm
