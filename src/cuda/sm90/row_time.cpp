#include "cuda/sm90/row_time.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moegemm::cuda::sm90 {
namespace {

/// Random segments scatter around their mean by its root: five equally likely sizes, in standard
/// deviations.
constexpr std::array kSpread = {-1.40, -0.53, 0.0, 0.53, 1.40};

// Fitted to the launches of an H200: every compiled kernel, 14 models and 9 random layers, 16 to
// 32768 tokens. The clock is the highest one, which the power limit seldom allows.

/// FLOPs per clock and multiprocessor in the main loop, of 4096.
struct Rate {
  Op op;
  int cols;
  int rows;
  double flops_per_clock;
};
constexpr std::array kRates = {
    Rate{Op::kForward, 128, 192, 3750}, Rate{Op::kForward, 192, 128, 3509},
    Rate{Op::kForward, 256, 128, 2797}, Rate{Op::kForward, 256, 160, 2850},
    Rate{Op::kDx, 128, 192, 3562},      Rate{Op::kDx, 192, 128, 3581},
    Rate{Op::kDx, 256, 192, 2590},
};
constexpr double kUnknownRate = 3200;

constexpr double kLoadBytesPerClock = 33.9;  ///< of operands, by one multiprocessor
constexpr double kShareOfBus = 0.875;        ///< of device memory
constexpr double kLaunchMicroseconds = 7.9;
/// What a tile's first loads and last stores take when nothing hides them, for 8192 elements.
constexpr double kTileMicroseconds = 1.84;
constexpr double kTileElements = 8192;
/// Beyond this many the last wave is not worth counting.
constexpr double kCountedWaves = 12;
/// Few rows: only loading counts.
constexpr int kStreamingRows = 64;

double round_up(double value, double step) { return std::ceil(value / step - 1e-9) * step; }

/// A maximum without an edge: close to it both limits cost.
double soft_max(double a, double b) {
  const double a2 = a * a;
  const double b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

double flops_per_clock(Op op, const TileShape& tile) {
  for (const Rate& rate : kRates) {
    if (rate.op == op && rate.cols == tile.columns && rate.rows == tile.rows) {
      return rate.flops_per_clock;
    }
  }
  return kUnknownRate;
}

}  // namespace

RowWork::RowWork(const Problem& problem, const DeviceFacts& facts)
    : op_(problem.op),
      multiprocessors_(std::max(facts.multiprocessors, 1)),
      clock_hz_(facts.clock_hz),
      bytes_per_second_(facts.bytes_per_second * kShareOfBus) {
  const bool forward = problem.op == Op::kForward;
  const auto rows = static_cast<double>(problem.rows);
  const auto experts = static_cast<double>(problem.experts);
  // Every row picks an expert at random.
  experts_ =
      std::max(1.0, experts * -std::expm1(rows * std::log1p(-1 / std::max(experts, 1 + 1e-9))));
  rows_ = rows / experts_;
  row_deviation_ = std::sqrt(rows_);
  cols_ = static_cast<double>(forward ? problem.n : problem.k);
  depth_ = round_up(static_cast<double>(forward ? problem.k : problem.n), 64);
}

RowWork::RowTiles RowWork::row_tiles(const TileShape& tile) const {
  const double granule = tile.rows <= kStreamingRows ? 8 : 16;
  RowTiles tiles;
  for (const double deviation : kSpread) {
    const double rows = std::max(1.0, rows_ + deviation * row_deviation_);
    const double count = std::ceil(rows / tile.rows);
    tiles.count += count;
    tiles.rows += count * round_up(rows / count, granule);
  }
  tiles.rows /= tiles.count;
  tiles.count /= kSpread.size();
  return tiles;
}

double RowWork::waves(const TileShape& tile) const {
  return experts_ * row_tiles(tile).count * std::ceil(cols_ / tile.columns) / multiprocessors_;
}

double RowWork::microseconds(const TileShape& tile) const {
  const RowTiles rows = row_tiles(tile);
  const double tiles = experts_ * rows.count * std::ceil(cols_ / tile.columns);
  const double waves = tiles / multiprocessors_;
  constexpr double kElementBytes = 2;
  const double multiplied =
      tile.rows <= kStreamingRows
          ? 0
          : 2 * tile.columns * rows.rows * depth_ / flops_per_clock(op_, tile) / clock_hz_;
  const double loaded =
      (tile.columns + rows.rows) * depth_ * kElementBytes / kLoadBytesPerClock / clock_hz_;
  const double alone = soft_max(multiplied, loaded);
  // An expert's weights come from device memory once, whatever tiles share them.
  const double from_memory = tile.columns * depth_ * kElementBytes / rows.count / bytes_per_second_;
  const double full_wave = soft_max(alone, multiprocessors_ * from_memory);
  double seconds = waves * full_wave;
  if (waves <= kCountedWaves) {
    const double full = std::floor(waves + 1e-6);
    const double left = tiles - full * multiprocessors_;
    seconds = full * full_wave + (left > 0.01 ? soft_max(alone, left * from_memory) : 0);
  }
  const double exposed = kTileMicroseconds * tile.columns * tile.rows / kTileElements;
  return kLaunchMicroseconds + exposed + seconds * 1e6;
}

}  // namespace moegemm::cuda::sm90
