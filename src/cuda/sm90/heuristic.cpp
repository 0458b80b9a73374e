#include "cuda/sm90/heuristic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "cuda/sm80/heuristic.h"

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

/// What the time of a forward or dX kernel depends on besides its tile; host facts only.
class RowWork {
 public:
  RowWork(const Problem& problem, const DeviceFacts& facts);

  /// Tiles that each multiprocessor gets, on average.
  double waves(const TileShape& tile) const;

  /// Microseconds. Tells how a tile fits the problem: padded columns and rows, a last wave that is
  /// nearly empty, multiprocessors that get no tile. What it does not know (how well L2 keeps the
  /// weights, the order of tiles) decides where there are many waves, and is measured.
  double microseconds(const TileShape& tile) const;

 private:
  /// An expert's tiles over random routing.
  struct RowTiles {
    double count = 0;  ///< per expert
    double rows = 0;   ///< in each, as the tensor cores count them
  };
  RowTiles row_tiles(const TileShape& tile) const;

  Op op_;
  double multiprocessors_;
  double clock_hz_;
  double bytes_per_second_;
  double experts_;        ///< in use
  double rows_;           ///< of each
  double row_deviation_;  ///< standard
  double cols_;
  double depth_;
};

RowWork::RowWork(const Problem& problem, const DeviceFacts& facts)
    : op_(problem.op),
      multiprocessors_(std::max(facts.multiprocessors, 1)),
      clock_hz_(facts.clock_hz),
      bytes_per_second_(facts.bytes_per_second * kShareOfBus) {
  const bool forward = problem.op == Op::kForward;
  const auto rows = static_cast<double>(problem.planned_rows());
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

/// A row GEMM by its tile: features x rows.
struct Shape {
  int features;
  int rows;
};

constexpr Shape kLow = {128, 32};    ///< streams weights, more of them in flight
constexpr Shape kSmall = {128, 64};  ///< streams weights, few rows
constexpr Shape kTall = {128, 192};  ///< pingpong: its stores hide under the other main loop
constexpr Shape kBalanced = {192,
                             128};   ///< pingpong, two tiles of 128 rows waste less than 2 x 192
constexpr Shape kWide = {256, 160};  ///< cooperative: least gathering per product
constexpr Shape kWideInOrder = {256, 128};
constexpr Shape kWideDx = {256, 192};
constexpr Shape kThin = {64, 128};  ///< few columns: reads rows, hardly multiplies

using Preference = std::array<Shape, 4>;

/// The most columns of a thin product, or of the thin side of a dW.
constexpr std::int64_t kThinColumns = 64;

/// Sizes scatter around the average: at 64 every second expert would need two tiles of 64 rows.
constexpr double kFewRows = 48;
/// Likewise for tiles of 32 rows.
constexpr double kVeryFewRows = 16;
/// Contractions up to this are short.
constexpr std::int64_t kShortDepth = 2304;
/// The estimated times scatter by several percent; less than this is no reason to leave the ranks.
constexpr double kClearly = 1.05;

bool is(const Shape& shape, const TileShape& tile) {
  return tile.columns == shape.features && tile.rows == shape.rows;
}

/// A short problem whose large tiles do not even occupy every multiprocessor: the latency of their
/// first loads and last stores is most of the time, and small tiles have less of it.
bool fits_one_wave_only(const RowWork& work, const TileShape& preferred, const TileShape& small,
                        const Problem& problem) {
  const std::int64_t depth = problem.op == Op::kForward ? problem.k : problem.n;
  return depth <= 1536 && work.waves(preferred) <= 1 && work.waves(small) <= 2.5;
}

/// The position of the tile for problems of few tiles, -1 where it is none of them. The lowest one
/// while it has few waves. Microseconds on an H200, 128x32 and 128x64, 86 rows for each of 7
/// experts: N = 1408, K = 1120 16.9 and 24.0; N = 2240, K = 1376 27.2 and 28.9; N = 2240, K = 1408,
/// gathered, 28.5 and 28.4.
int chosen_for_few_tiles(std::span<const KernelEntry* const> feasible, const TileShape& preferred,
                         const RowWork& work, const Problem& problem) {
  int small = -1;
  int low = -1;
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    if (is(kSmall, feasible[i]->info.tile)) small = static_cast<int>(i);
    if (is(kLow, feasible[i]->info.tile)) low = static_cast<int>(i);
  }
  if (small < 0 || !fits_one_wave_only(work, preferred, feasible[small]->info.tile, problem))
    return -1;
  return low >= 0 && work.waves(feasible[low]->info.tile) <= 3 ? low : small;
}

/// The part of the output's columns in tiles of `features` that is not padding.
double fill(std::int64_t cols, int features) {
  const std::int64_t tiles = (cols + features - 1) / features;
  return static_cast<double>(cols) / static_cast<double>(tiles * features);
}

/// What decides between the kernels, all known on the host.
struct Facts {
  double rows;         ///< per expert in use, on average
  std::int64_t cols;   ///< of the output
  std::int64_t depth;  ///< contraction
  bool forward;
  bool gathers;
  bool balanced_fits;       ///< 192 columns divide the output (nearly)
  bool balanced_pads_less;  ///< by more than 1.5% than 128 columns do: widths like 2880
};

Facts facts_of(const Problem& problem) {
  const bool forward = problem.op == Op::kForward;
  const std::int64_t cols = forward ? problem.n : problem.k;
  const double experts =
      std::max<double>(1, std::min<double>(problem.experts, problem.planned_rows()));
  return {static_cast<double>(problem.planned_rows()) / experts,
          cols,
          forward ? problem.k : problem.n,
          forward,
          problem.gathers(),
          fill(cols, kBalanced.features) >= 0.99,
          fill(cols, kBalanced.features) >= fill(cols, kTall.features) + 0.015};
}

/// Rows in order and a long contraction: what one column of wide tiles reads is what L2 should
/// keep.
bool is_long_in_order(const Facts& facts) {
  if (facts.gathers) return false;
  if (facts.forward) return facts.depth >= 8192 && facts.rows > 1500;
  if (facts.rows > 4096) return facts.depth >= 16384;
  return facts.depth >= 4096 && facts.rows > (facts.depth >= 24576 ? 450 : 600);
}

/// Tiles are full of rows, so padded columns, stores and gathering decide.
Preference for_many_rows(const Facts& facts, Shape wide) {
  if (facts.balanced_pads_less) return {kBalanced, kTall, wide, kSmall};
  if (is_long_in_order(facts)) return {wide, kBalanced, kTall, kSmall};
  if (facts.rows > 4096) return {kBalanced, kTall, wide, kSmall};
  if (facts.forward && facts.gathers) {
    if (facts.rows > 700 && facts.balanced_fits) return {kBalanced, kTall, wide, kSmall};
    if (facts.rows <= 700 || facts.depth >= 4096) return {wide, kTall, kBalanced, kSmall};
  }
  if (!facts.forward && facts.gathers && facts.depth > 6144) {
    return {wide, kBalanced, kTall, kSmall};
  }
  return {kTall, kBalanced, wide, kSmall};
}

/// Best first; what is not compiled or not feasible for a problem is passed over. The borders are
/// those where the kernels' speeds cross on an H200, over 14 models and 16 to 32768 tokens
/// (docs/benchmarks/planner/planner.md).
Preference preference(const Problem& problem) {
  const Facts facts = facts_of(problem);
  const bool gathered_forward = facts.forward && facts.gathers;
  const Shape wide = !facts.forward ? kWideDx : (facts.gathers ? kWide : kWideInOrder);
  if (facts.rows <= kVeryFewRows && facts.forward) return {kLow, kSmall, kBalanced, kTall};
  if (facts.rows <= kFewRows) return {kSmall, kBalanced, kTall, wide};
  if (facts.cols <= kThinColumns) return {kThin, kTall, kBalanced, wide};
  if (facts.rows <= (gathered_forward ? 115 : 105)) return {kBalanced, kTall, wide, kSmall};
  if (facts.rows <= 200) {
    const bool long_depth = gathered_forward
                                ? facts.depth >= 4096
                                : !facts.forward && facts.gathers && facts.depth > 6144;
    if (long_depth) return {wide, kTall, kBalanced, kSmall};
    return {kTall, wide, kBalanced, kSmall};
  }
  if (facts.rows <= (facts.gathers ? 450 : 300) && !gathered_forward) {
    const std::int64_t cols = facts.forward ? problem.n : problem.k;
    if (facts.depth <= 1024 || fill(cols, kBalanced.features) < 0.95) {
      return {kTall, kBalanced, wide, kSmall};
    }
    return {kBalanced, wide, kTall, kSmall};
  }
  return for_many_rows(facts, wide);
}

/// Segments whose tall tiles are less than 80% full of rows, where the other tiles suit them
/// better: 200 to 307 rows take two tiles of 192, 385 to 450 take three.
bool tall_is_half_empty(double rows) {
  if (rows <= 200 || rows > 450) return false;
  return rows / (std::ceil(rows / kTall.rows) * kTall.rows) < 0.8;
}

/// Activated kernels: these four (kWide is gathered only).
Preference preference_activated(double rows) {
  if (rows <= kVeryFewRows) return {kLow, kSmall, kWide, kTall};
  if (rows <= kFewRows) return {kSmall, kWide, kTall, kBalanced};
  if (rows <= 115 || tall_is_half_empty(rows)) return {kWide, kTall, kSmall, kBalanced};
  return {kTall, kWide, kSmall, kBalanced};
}

/// dW of an operand that a thin tile holds whole. The gathered one is on the wide side.
bool has_thin_side(const Problem& problem) {
  if (problem.gathers()) return (problem.gathers_x() ? problem.n : problem.k) <= kThinColumns;
  return std::min(problem.n, problem.k) <= kThinColumns;
}

constexpr Shape kDecoded = {128, 128};      ///< quantised weights, up to 128 rows
constexpr Shape kDecodedTall = {128, 256};  ///< the same, 130 rows and more

/// Quantised weights: few rows stream them, the other tiles decode them once for as many rows as
/// they have.
int choose_quantised(std::span<const KernelEntry* const> feasible, const Problem& problem) {
  if (sm80::streaming_is_faster(problem)) {
    const int streaming = sm80::choose_streaming(feasible, problem);
    if (streaming >= 0) return streaming;
  }
  const double rows = facts_of(problem).rows;
  const Shape best = rows <= kVeryFewRows && problem.op == Op::kForward ? kLow
                     : rows <= 110                                      ? kDecoded
                                                                        : kDecodedTall;
  int chosen = 0;
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    if (is(best, feasible[i]->info.tile)) return static_cast<int>(i);
    if (is(kDecodedTall, feasible[i]->info.tile)) chosen = static_cast<int>(i);
  }
  return chosen;
}

/// TF32: a tile for few rows, and one for many.
int choose_tf32(std::span<const KernelEntry* const> feasible, const Problem& problem,
                const DeviceFacts& facts) {
  int small = -1;
  int wide = -1;
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    (is(kSmall, feasible[i]->info.tile) ? small : wide) = static_cast<int>(i);
  }
  if (small < 0 || wide < 0) return 0;
  if (facts_of(problem).rows <= kFewRows) return small;
  const RowWork work(problem, facts);
  const TileShape& tile = feasible[wide]->info.tile;
  return fits_one_wave_only(work, tile, feasible[small]->info.tile, problem) ? small : wide;
}

}  // namespace

int preference_rank(const KernelInfo& kernel, const Problem& problem) {
  if (problem.op == Op::kDw) {
    const bool thin = std::min(kernel.tile.rows, kernel.tile.columns) <= kThinColumns;
    return thin == has_thin_side(problem) ? 0 : 1;
  }
  const Preference order =
      problem.activation ? preference_activated(facts_of(problem).rows) : preference(problem);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (kernel.tile.columns == order[i].features && kernel.tile.rows == order[i].rows) {
      return static_cast<int>(i);
    }
  }
  return static_cast<int>(order.size());
}

int choose_among(std::span<const KernelEntry* const> feasible, const Problem& problem,
                 const DeviceFacts& facts) {
  if (!problem.quantization.plain()) return choose_quantised(feasible, problem);
  if (problem.dtype == DType::kFloat32 && problem.op != Op::kDw) {
    return choose_tf32(feasible, problem, facts);
  }
  int preferred = -1;
  int best_rank = 0;
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    const int rank = preference_rank(feasible[i]->info, problem);
    if (preferred < 0 || rank < best_rank) {
      preferred = static_cast<int>(i);
      best_rank = rank;
    }
  }
  if (problem.op == Op::kDw || problem.activation || feasible.size() < 2) return preferred;
  if (is(kThin, feasible[preferred]->info.tile)) return preferred;

  const RowWork work(problem, facts);
  const double rows = facts_of(problem).rows;
  const double preferred_us = work.microseconds(feasible[preferred]->info.tile);
  int best = preferred;
  double best_us = preferred_us / kClearly;
  if (!is(kLow, feasible[preferred]->info.tile)) {
    const int few = chosen_for_few_tiles(feasible, feasible[preferred]->info.tile, work, problem);
    if (few >= 0) return few;
  }
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    const TileShape& tile = feasible[i]->info.tile;
    // The estimate does not know what it is worth to have more weights in flight; of thin tiles the
    // preference knows when they are.
    if (is(kLow, tile) || is(kThin, tile)) continue;
    // Wide and tall tiles stream weights worse than the estimate knows.
    if (rows <= kFewRows && !is(kSmall, tile) && !is(kBalanced, tile)) continue;
    const double us = work.microseconds(tile);
    if (us < best_us) {
      best = static_cast<int>(i);
      best_us = us;
    }
  }
  return best;
}

bool weights_pass_through_l2(const Problem& problem, const TileShape& tile, std::int64_t l2_bytes) {
  // What it brings, fwd1 on an H200, tokens in brackets. K = 2048: Qwen3-Next (2048) 1 %, (4096 to
  // 8192) 3 %, Qwen3-30B (1500, 2048) 3, 4 %, OLMoE (1024) 3 %. Longer: gpt-oss-120b (3000) -1 %,
  // Mixtral (512) -3 %, Llama-4 Scout (2048) -4 %, DeepSeek-V3 (1024 to 4096) -1 to -4 %, Kimi-K2
  // (8192) 0. Two tiles for each expert: Qwen3-Next (12000) 0, gpt-oss-120b (8192) -3 %.
  if (problem.op != Op::kForward || !problem.gathers() || tile.rows <= kSmall.rows ||
      problem.k > kShortDepth) {
    return false;
  }
  const std::int64_t gathered_bytes =
      problem.flat_rows() / problem.gather_divisor() * problem.k * size_bytes(problem.dtype);
  return problem.planned_rows() <= problem.experts * tile.rows &&
         4 * gathered_bytes <= 3 * l2_bytes;
}

bool fusing_is_faster(const Problem& problem, const TileShape& tile) {
  // Gain over the best plain kernel with a pass after it, six models at 64 to 16384 tokens on an
  // H200, the contenders of each in one round robin; the pass counts the less the longer the
  // contraction is.
  //   rows per expert   K       gathered                       in order (tall)
  //   up to 48          any     small  0 to 7 %                small  0 to 10 %
  //   64                2048    wide   4 to 7 %  (tall 4, 6)     10 to 17 %
  //                     longer  wide   1 to 3 %  (tall -1 to 1)  1 to 5 %
  //   80 (Qwen3-Next)   2048    tall   5 %                       11 %
  //   128, 160          any     tall   2 to 11 %                 3 to 10 %
  //   256               2048    wide   2 to 4 %  (tall -1)       8, 12 %
  //                     longer  wide  -2 to 0 %  (tall -5 to -7) -7 to -4 %
  //   320 and more      <= 4096 tall   4 to 11 %                 5 to 12 %
  //                     7168    tall  -1 %                       3 %
  const Facts facts = facts_of(problem);
  if (is(kLow, tile) || is(kSmall, tile)) return facts.rows <= kFewRows;
  if (is(kWide, tile)) return facts.rows <= 115 || facts.depth <= kShortDepth;
  if (tall_is_half_empty(facts.rows)) return !facts.gathers && facts.depth <= kShortDepth;
  if (!facts.gathers) return true;
  if (facts.rows <= 115) return facts.depth <= kShortDepth;
  return facts.rows <= 200 || facts.depth <= 4096;
}

bool gathering_first_is_faster(const Problem& problem) {
  // The TF32 kernel takes rows through registers, in whatever order they come.
  if (problem.dtype == DType::kFloat32) return false;
  // Rows gathered by cp.async cost the dW kernel 10 % of its clocks over rows that TMA copies
  // (Mixtral, counters), whatever the width of the other operand; a copy is written and read once.
  // T = 8192 on an H200, TFLOP/s after a copy / gathered in the kernel: Mixtral dw1 691 / 645, dw2
  // 678 / 634; Llama-4 Scout 617 / 575, 618 / 589; DeepSeek-V3 dw1 494 / 463; gpt-oss dw1 503 /
  // 500.
  constexpr std::int64_t kWideEnough = 4096;
  const std::int64_t gathered = problem.gathers_x() ? problem.k : problem.n;
  const std::int64_t other = problem.gathers_x() ? problem.n : problem.k;
  // The copy is lent memory: no more of it than dW itself takes. With that much, Mixtral dw2 at
  // 32768 tokens, 686 / 615 in two runs; torch 666 / 635 beside them.
  return other >= kWideEnough &&
         problem.planned_rows() * gathered <= problem.experts * problem.n * problem.k;
}

}  // namespace moegemm::cuda::sm90
