#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/factor_tiles.h"
#include "core/refusal.h"
#include "cpu/element_type.h"
#include "cpu/parallel.h"
#include "cpu/passes/passes.h"
#include "cpu/routing_data.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/isa/instruction_set.h"
#include "cpu/simd/memory/output_pages.h"

/// Where memory runs along the columns in both tensors, line after line. Else tiles of kTile lines
/// by kTile columns, read along the memory of `from` into a buffer and written along that of `to`.
namespace moegemm::cpu {
namespace {

/// 512 bytes of fp32 at a time, so that memory's pages change seldom.
constexpr std::int64_t kTile = 128;
/// Lines that are turned at a time: a line of the cache of 16-bit numbers, 16 KiB of fp32.
constexpr int kSlabLines = 32;
constexpr std::int64_t kGrainTiles = 4;
constexpr std::int64_t kGrainElems = 64 * 1024;

/// Where one line or column is.
struct Place {
  std::int64_t from;
  std::int64_t to;
  std::int64_t expert;  ///< -1: not of this side
  bool given;           ///< else zeros
};

Place place(const FactorSide& side, std::int64_t outer, std::int64_t inner) {
  return {outer * side.from_outer + inner * side.from_inner,
          outer * side.to_outer + inner * side.to_inner,
          side.inner_is_expert   ? inner
          : side.outer_is_expert ? outer
                                 : -1,
          outer < side.given_outer && inner < side.given_inner};
}

struct TileRange {
  Place columns[kTile];
  Place lines[kTile];
  int column_count;
  int line_count;
};

bool is_used(const char* used, const Place& line, const Place& column) {
  return used == nullptr || used[std::max(line.expert, column.expert)] != 0;
}

/// Lines are given, and memory has no gap on either way. Experts without rows may be among the
/// columns.
bool is_plain(const TileRange& tile, const char* used) {
  const auto runs = [](const Place* places, int count, std::int64_t Place::*offset) {
    for (int i = 0; i < count; ++i) {
      if (places[i].*offset != places[0].*offset + i) return false;
    }
    return true;
  };
  const auto given = [](const Place& one) { return one.given; };
  const auto is_line_used = [&](const Place& one) {
    return used == nullptr || one.expert < 0 || used[one.expert] != 0;
  };
  return runs(tile.columns, tile.column_count, &Place::from) &&
         runs(tile.lines, tile.line_count, &Place::to) &&
         std::all_of(tile.columns, tile.columns + tile.column_count, given) &&
         std::all_of(tile.lines, tile.lines + tile.line_count, given) &&
         std::all_of(tile.lines, tile.lines + tile.line_count, is_line_used);
}

template <typename From, typename To>
void round_run(const From* from, float scaling, std::int64_t count, To* to) {
  if constexpr (std::is_same_v<From, float> && !std::is_same_v<To, float>) {
    simd::kernels_for(simd::kernels_of(simd::active_instruction_set()), To::kDtype)
        .round(from, scaling, count, to);
  } else {
    for (std::int64_t i = 0; i < count; ++i) store(scaling * to_float(from[i]), to[i]);
  }
}

/// 16 bytes, as many lines and columns as that are of elements.
template <typename To>
struct Square {
  static constexpr int kExtent = 16 / sizeof(To);
  using Bits = std::conditional_t<sizeof(To) == 4, std::uint32_t, std::uint16_t>;
  typedef Bits Vec __attribute__((vector_size(16)));
  Vec lines[kExtent];

  /// Line i takes turns with line i + half of them, as often as a line has halves.
  void turn() {
    constexpr int kHalf = kExtent / 2;
    for (int round = 1; round < kExtent; round *= 2) {
      Vec next[kExtent];
      for (int i = 0; i < kHalf; ++i) {
        next[2 * i] = low(lines[i], lines[i + kHalf]);
        next[2 * i + 1] = high(lines[i], lines[i + kHalf]);
      }
      for (int i = 0; i < kExtent; ++i) lines[i] = next[i];
    }
  }

 private:
  static Vec low(Vec a, Vec b) {
    if constexpr (kExtent == 4) {
      return __builtin_shufflevector(a, b, 0, 4, 1, 5);
    } else {
      return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    }
  }
  static Vec high(Vec a, Vec b) {
    if constexpr (kExtent == 4) {
      return __builtin_shufflevector(a, b, 2, 6, 3, 7);
    } else {
      return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    }
  }
};

/// Some lines are rounded into a buffer that stays in the first cache, and turned from there.
template <typename From, typename To>
void turn_plain_tile(const From* from, To* to, float scaling, const TileRange& tile,
                     const char* used) {
  using Block = Square<To>;
  constexpr int kExtent = Block::kExtent;
  To rounded[kSlabLines][kTile + kExtent];
  for (int first = 0; first < tile.line_count; first += kSlabLines) {
    const int lines = std::min(kSlabLines, tile.line_count - first);
    for (int l = 0; l < lines; ++l) {
      round_run(from + tile.columns[0].from + tile.lines[first + l].from, scaling,
                tile.column_count, rounded[l]);
    }
    const auto target_of = [&](int c) { return to + tile.lines[0].to + tile.columns[c].to; };
    const auto is_used_column = [&](int c) {
      const std::int64_t expert = tile.columns[c].expert;
      return used == nullptr || expert < 0 || used[expert] != 0;
    };
    for (int c = 0; c < tile.column_count; c += kExtent) {
      const int columns = std::min(kExtent, tile.column_count - c);
      const int squares = columns == kExtent ? lines / kExtent : 0;
      for (int at = 0; at < squares * kExtent; at += kExtent) {
        Block block;
        for (int l = 0; l < kExtent; ++l) std::memcpy(&block.lines[l], &rounded[at + l][c], 16);
        block.turn();
        for (int i = 0; i < kExtent; ++i) {
          if (is_used_column(c + i)) {
            std::memcpy(target_of(c + i) + first + at, &block.lines[i], 16);
          }
        }
      }
      for (int i = 0; i < columns && squares * kExtent < lines; ++i) {
        if (!is_used_column(c + i)) continue;
        To* const target = target_of(c + i) + first;
        for (int l = squares * kExtent; l < lines; ++l) target[l] = rounded[l][c + i];
      }
    }
  }
}

template <typename From, typename To>
void copy_tile(const From* from, To* to, float scaling, const TileRange& tile, const char* used,
               bool turned) {
  if (turned && is_plain(tile, used)) return turn_plain_tile(from, to, scaling, tile, used);
  for (int l = 0; l < tile.line_count; ++l) {
    for (int c = 0; c < tile.column_count; ++c) {
      const Place &line = tile.lines[l], &column = tile.columns[c];
      if (!is_used(used, line, column)) continue;
      const bool given = line.given && column.given;
      store(given ? scaling * to_float(from[line.from + column.from]) : 0.0f,
            to[line.to + column.to]);
    }
  }
}

int fill(const FactorSide& side, std::int64_t first, Place (&places)[kTile]) {
  const auto count = static_cast<int>(std::min(kTile, side.extent() - first));
  std::int64_t outer = first / side.inner, inner = first % side.inner;
  for (int i = 0; i < count; ++i) {
    places[i] = place(side, outer, inner);
    if (++inner == side.inner) inner = 0, ++outer;
  }
  return count;
}

/// Whether a copy is one of lines: the elements of each lie side by side in both tensors.
bool is_run(const FactorTiles& tiles) {
  const FactorSide& columns = tiles.columns;
  return !tiles.turned && columns.outer == 1 && columns.from_inner == 1 && columns.to_inner == 1 &&
         !columns.inner_is_expert;
}

template <typename From, typename To>
void copy_lines(const FactorCopy& copy, const FactorTiles& tiles, const char* used,
                std::int64_t begin, std::int64_t end) {
  const FactorSide& columns = tiles.columns;
  const float scaling = copy.scaling;
  for (std::int64_t at = begin; at < end; ++at) {
    const Place line = place(tiles.lines, at / tiles.lines.inner, at % tiles.lines.inner);
    if (used != nullptr && used[line.expert] == 0) continue;
    const From* const source = static_cast<const From*>(copy.from.data) + line.from;
    To* const target = static_cast<To*>(copy.to.data) + line.to;
    const std::int64_t given = line.given ? columns.given_inner : 0;
    round_run(source, scaling, given, target);
    std::fill(target + given, target + columns.inner, To{});
  }
}

template <typename From, typename To>
void copy_tiles(const FactorCopy& copy, const FactorTiles& tiles, const char* used,
                std::int64_t begin, std::int64_t end) {
  const std::int64_t across = (tiles.columns.extent() + kTile - 1) / kTile;
  TileRange range;
  for (std::int64_t tile = begin; tile < end; ++tile) {
    range.column_count = fill(tiles.columns, tile % across * kTile, range.columns);
    range.line_count = fill(tiles.lines, tile / across * kTile, range.lines);
    copy_tile(static_cast<const From*>(copy.from.data), static_cast<To*>(copy.to.data),
              copy.scaling, range, used, tiles.turned);
  }
}

/// One copy as work that can be shared out.
struct CopyJob {
  const FactorCopy* copy;
  const char* used;
  FactorTiles tiles;
  std::int64_t count;  ///< lines, or tiles
  std::int64_t grain;  ///< of them that a worker takes at least
  void (*part)(const FactorCopy&, const FactorTiles&, const char*, std::int64_t, std::int64_t);

  std::int64_t grains() const { return (count + grain - 1) / grain; }
  /// Grains [begin, end).
  void run(std::int64_t begin, std::int64_t end) const {
    if (begin < end) part(*copy, tiles, used, begin * grain, std::min(end * grain, count));
  }
};

CopyJob job_of(const FactorCopy& copy, const char* used) {
  CopyJob job = {&copy, used, factor_tiles(copy), 0, 0, nullptr};
  const auto tiles_of = [](const FactorSide& side) { return (side.extent() + kTile - 1) / kTile; };
  const FactorTiles& tiles = job.tiles;
  const bool run = is_run(tiles);
  job.count = run ? tiles.lines.extent() : tiles_of(tiles.columns) * tiles_of(tiles.lines);
  job.grain = run ? std::max<std::int64_t>(1, kGrainElems / tiles.columns.inner) : kGrainTiles;
  with_element_type(copy.from.dtype, [&]<typename From>(From*) {
    with_element_type(copy.to.dtype, [&]<typename To>(To*) {
      job.part = run ? &copy_lines<From, To> : &copy_tiles<From, To>;
    });
  });
  return job;
}

/// Whether each expert has rows; empty without m_sizes.
std::vector<char> used_experts(std::span<const FactorCopy> copies, const TensorView& m_sizes) {
  std::int64_t experts = 0;
  for (const FactorCopy& copy : copies) experts = std::max(experts, copy.to.shape[0]);
  std::vector<char> flags(m_sizes.given() ? experts : 0);
  for (std::size_t e = 0; e < flags.size(); ++e) {
    flags[e] = read_index(m_sizes.data, m_sizes.dtype, static_cast<std::int64_t>(e)) > 0;
  }
  return flags;
}

simd::OutputSpan span_of(const StridedStack& stack) {
  std::int64_t elements = 1;
  for (int dim = 0; dim < 3; ++dim) elements += (stack.shape[dim] - 1) * stack.strides[dim];
  const std::int64_t bytes = elements * size_bytes(stack.dtype);
  return {stack.data, 1, bytes, bytes};
}

/// Memory without gaps.
bool is_dense(const StridedStack& stack) {
  return span_of(stack).row_bytes ==
         stack.shape[0] * stack.shape[1] * stack.shape[2] * size_bytes(stack.dtype);
}

}  // namespace

void CpuPasses::copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes,
                             const ExecutionContext& context) const {
  const std::vector<char> flags = used_experts(copies, m_sizes);
  std::vector<CopyJob> jobs;
  std::vector<simd::OutputSpan> outputs;
  std::int64_t count = 0;
  for (const FactorCopy& copy : copies) {
    jobs.push_back(job_of(copy, flags.empty() ? nullptr : flags.data()));
    count += jobs.back().grains();
    if (is_dense(copy.to)) outputs.push_back(span_of(copy.to));
  }
  simd::prepare_output_pages(outputs, context);
  // All copies in one turn of the workers: meeting takes them as long as a small copy.
  for_each_range(context, count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (const CopyJob& job : jobs) {
      const std::int64_t grains = job.grains();
      job.run(std::clamp<std::int64_t>(begin, 0, grains), std::clamp<std::int64_t>(end, 0, grains));
      begin -= grains, end -= grains;
    }
  });
}

void CpuPasses::factor_rows(const TensorView& x, const StridedStack&, const RoutingView&,
                            const TensorView&, const ExecutionContext&) const {
  throw Error(ErrorKind::kNotImplemented,
              join("factor_rows: x is on ", to_string(x.device), ", not on a GPU"));
}

}  // namespace moegemm::cpu
