#include "cuda/sm90/heuristic.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/sm80/heuristic.h"

namespace moegemm::cuda::sm90 {
namespace {

/// Random segments scatter around their mean by its root: five equally likely sizes, in standard
/// deviations.
constexpr std::array kSpread = {-1.40, -0.53, 0.0, 0.53, 1.40};

// Fitted to the launches of an H200: every compiled kernel, 14 models and 210 random layers whose
// widths are multiples of 8, 1 to 32768 tokens. What was fitted is which kernel is fastest: no
// constant alone is a measurement of the hardware. The clock is the highest one, which the power
// limit seldom allows.

/// What one multiprocessor needs for a tile.
struct TileCost {
  Op op;
  int cols;
  int rows;
  double flops_per_clock;  ///< in the main loop, of 4096
  double bytes_per_clock;  ///< of operands, in order and aligned
  double clocks;           ///< between two main loops
  double exposed_us;       ///< first loads and last stores of a launch, which nothing hides
};
constexpr std::array kTileCosts = {
    TileCost{Op::kForward, 128, 32, 718, 71.8, 121, 1.39},
    TileCost{Op::kForward, 128, 64, 1510, 40.3, 603, 2.88},
    TileCost{Op::kForward, 128, 192, 3460, 45.6, 2110, 7.10},
    TileCost{Op::kForward, 192, 128, 2850, 51.7, 1860, 6.56},
    TileCost{Op::kForward, 256, 160, 2840, 54.9, 3380, 6.33},
    TileCost{Op::kForward, 256, 128, 2780, 58.0, 3390, 5.47},
    TileCost{Op::kDx, 128, 64, 1730, 44.2, 190, 1.22},
    TileCost{Op::kDx, 128, 192, 3970, 45.0, 1430, 5.85},
    TileCost{Op::kDx, 192, 128, 2600, 48.6, 618, 4.29},
    TileCost{Op::kDx, 256, 192, 2510, 51.2, 1950, 9.79},
};

constexpr double kGatheredLoads = 0.731;  ///< the rate of loads while rows are gathered
/// Times that a load takes by where its operand's lines begin: at multiples of 128, 64, 32, 16
/// bytes.
constexpr std::array kUnalignedLoads = {1.0, 1.13, 1.19, 1.73};
constexpr double kShareOfBus = 1.26;     ///< of device memory, were there nothing else to wait for
constexpr double kShareOfL2 = 0.828;     ///< that rows can fill before they are read again
constexpr double kRowsReadAgain = 1.42;  ///< times, by another tile across, where L2 has lost them
constexpr double kLaunchMicroseconds = 9.33;
/// Up to this many rows tiles go by 8 of them, others by 16.
constexpr int kStreamingRows = 64;

double round_up(double value, double step) { return std::ceil(value / step - 1e-9) * step; }

/// A maximum without an edge: close to it both limits cost.
double soft_max(double a, double b) {
  const double a2 = a * a;
  const double b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

/// nullptr where the tile was not measured.
const TileCost* cost_of(Op op, const TileShape& tile) {
  for (const TileCost& cost : kTileCosts) {
    if (cost.op == op && cost.cols == tile.columns && cost.rows == tile.rows) return &cost;
  }
  return nullptr;
}

/// By how much loads of lines of this many elements are slower.
double unaligned_loads(std::int64_t elements) {
  const int zeros = std::countr_zero(static_cast<std::uint64_t>(elements) | 64);
  return kUnalignedLoads[std::clamp(6 - zeros, 0, 3)];
}

/// What the time of a forward or dX kernel depends on besides its tile; host facts only.
class RowWork {
 public:
  RowWork(const Problem& problem, const DeviceFacts& facts);

  /// Tiles that each multiprocessor gets, on average.
  double waves(const TileShape& tile) const;

  /// Microseconds, the mean of random and of even routing. Tells how a tile fits the problem:
  /// padded columns and rows, a last wave that is nearly empty, multiprocessors that get no tile,
  /// rows that L2 cannot keep, unaligned lines.
  double microseconds(const TileCost& cost) const;

  /// Whether the lines of both operands begin at multiples of 128 bytes.
  bool aligned() const { return row_loads_ == 1 && weight_loads_ == 1; }

 private:
  /// All tiles along the rows.
  struct RowTiles {
    double experts = 0;  ///< in use
    double count = 0;
    double rows = 0;  ///< in all of them, as the tensor cores count them

    void add(double segments, double segment_rows, int tile_rows);
  };
  RowTiles random_tiles(int tile_rows) const;
  RowTiles even_tiles(int tile_rows) const;
  double seconds(const TileCost& cost, const RowTiles& tiles) const;

  double multiprocessors_;
  double clock_hz_;
  double bytes_per_second_;
  double l2_bytes_;
  double experts_;
  double rows_;  ///< of all experts
  double cols_;
  double depth_;
  double load_rate_;     ///< of a tile's
  double row_loads_;     ///< times that one takes
  double weight_loads_;  ///< likewise
};

RowWork::RowWork(const Problem& problem, const DeviceFacts& facts)
    : multiprocessors_(std::max(facts.multiprocessors, 1)),
      clock_hz_(facts.clock_hz),
      bytes_per_second_(facts.bytes_per_second * kShareOfBus),
      l2_bytes_(static_cast<double>(std::max<std::int64_t>(facts.l2_bytes, 1)) * kShareOfL2),
      experts_(static_cast<double>(problem.experts)),
      rows_(static_cast<double>(problem.planned_rows())),
      load_rate_(problem.gathers() ? kGatheredLoads : 1) {
  const bool forward = problem.op == Op::kForward;
  const std::int64_t depth = forward ? problem.k : problem.n;
  cols_ = static_cast<double>(forward ? problem.n : problem.k);
  depth_ = round_up(static_cast<double>(depth), 64);
  row_loads_ = unaligned_loads(depth);
  weight_loads_ = unaligned_loads(problem.k);
}

void RowWork::RowTiles::add(double segments, double segment_rows, int tile_rows) {
  const double tiles = std::ceil(segment_rows / tile_rows);
  experts += segments;
  count += segments * tiles;
  rows += segments * tiles * round_up(segment_rows / tiles, tile_rows <= kStreamingRows ? 8 : 16);
}

RowWork::RowTiles RowWork::random_tiles(int tile_rows) const {
  // Every row picks an expert at random.
  const double used =
      std::max(1.0, experts_ * -std::expm1(rows_ * std::log1p(-1 / std::max(experts_, 1 + 1e-9))));
  const double mean = rows_ / used;
  RowTiles tiles;
  for (const double deviation : kSpread) {
    tiles.add(used / kSpread.size(), std::max(1.0, mean + deviation * std::sqrt(mean)), tile_rows);
  }
  return tiles;
}

RowWork::RowTiles RowWork::even_tiles(int tile_rows) const {
  const double used = std::max(1.0, std::min(experts_, rows_));
  const double segment = std::max(1.0, std::floor(rows_ / used));
  const double longer = std::max(0.0, rows_ - segment * used);
  RowTiles tiles;
  tiles.add(used - longer, segment, tile_rows);
  tiles.add(longer, segment + 1, tile_rows);
  return tiles;
}

double RowWork::waves(const TileShape& tile) const {
  return random_tiles(tile.rows).count * std::ceil(cols_ / tile.columns) / multiprocessors_;
}

double RowWork::seconds(const TileCost& cost, const RowTiles& tiles) const {
  constexpr double kElementBytes = 2;
  const double line_bytes = depth_ * kElementBytes;
  const double rows = tiles.rows / tiles.count;
  const double down = tiles.count / tiles.experts;
  const double across = std::ceil(cols_ / cost.cols);

  const double multiplied = 2 * cost.cols * rows * depth_ / cost.flops_per_clock;
  const double loaded = (cost.cols * weight_loads_ + rows * row_loads_) * line_bytes /
                        (cost.bytes_per_clock * load_rate_);
  const double alone = (soft_max(multiplied, loaded) + cost.clocks) / clock_hz_;

  // Weights come from device memory once, whatever tiles share them. So do rows, if L2 keeps those
  // of all tiles in flight until the last column.
  const double in_flight = std::max(down, std::min(tiles.count, multiprocessors_ / across));
  const double filled = in_flight * rows * line_bytes / l2_bytes_;
  const double lost = filled * filled / (1 + filled * filled);
  const double rows_read = rows * (1 / across + kRowsReadAgain * lost * (1 - 1 / across));
  const double from_memory =
      ((cost.cols / down + rows_read) * line_bytes + cost.cols * rows * kElementBytes) /
      bytes_per_second_;

  const double count = tiles.count * across;
  const double full_waves = std::floor(count / multiprocessors_ + 1e-6);
  const double left = count - full_waves * multiprocessors_;
  return full_waves * soft_max(alone, multiprocessors_ * from_memory) +
         (left > 0.01 ? soft_max(alone, left * from_memory) : 0);
}

double RowWork::microseconds(const TileCost& cost) const {
  const double both = seconds(cost, random_tiles(cost.rows)) + seconds(cost, even_tiles(cost.rows));
  return kLaunchMicroseconds + cost.exposed_us + both / 2 * 1e6;
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
/// The estimated times scatter by several percent; less than this is no reason to leave the ranks,
/// which were measured with aligned lines.
constexpr double kClearly = 1.11;
constexpr double kClearlyUnaligned = 1.05;

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
  if (const int narrow = choose_narrow(feasible, problem, facts); narrow >= 0) return narrow;
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
  const TileCost* preferred_cost = cost_of(problem.op, feasible[preferred]->info.tile);
  if (preferred_cost == nullptr) return preferred;

  const RowWork work(problem, facts);
  int best = preferred;
  double best_us =
      work.microseconds(*preferred_cost) / (work.aligned() ? kClearly : kClearlyUnaligned);
  for (std::size_t i = 0; i < feasible.size(); ++i) {
    const TileCost* cost = cost_of(problem.op, feasible[i]->info.tile);
    if (cost == nullptr) continue;
    const double us = work.microseconds(*cost);
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
  if (tile.rows <= kSmall.rows) return facts.rows <= kFewRows;
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
