#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/factor_tiles.h"
#include "cpu/element_type.h"
#include "cpu/parallel.h"
#include "cpu/routing_data.h"

/// Tiles of kTile lines by kTile columns, read along the memory of `from` into a buffer that the
/// first cache holds, and written along that of `to`.
namespace moegemm::cpu {
namespace {

constexpr std::int64_t kTile = 64;
constexpr std::int64_t kGrainTiles = 16;

/// Where one line or column is.
struct Place {
  std::int64_t from;
  std::int64_t to;
  std::int64_t expert;  ///< -1: not of this side
  bool given;           ///< else zeros
};

Place place(const FactorSide& side, std::int64_t at) {
  const std::int64_t outer = at / side.inner, inner = at % side.inner;
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

/// Nothing is left out, and memory has no gap on either way: loops that compilers vectorise.
bool is_plain(const TileRange& tile, const char* used, bool turned) {
  const auto runs = [](const Place* places, int count, std::int64_t Place::*offset) {
    for (int i = 0; i < count; ++i) {
      if (places[i].*offset != places[0].*offset + i) return false;
    }
    return true;
  };
  const auto all = [&](const Place* places, int count) {
    return std::all_of(places, places + count, [&](const Place& one) {
      return one.given && (used == nullptr || one.expert < 0 || used[one.expert] != 0);
    });
  };
  return runs(tile.columns, tile.column_count, &Place::from) &&
         (turned ? runs(tile.lines, tile.line_count, &Place::to)
                 : runs(tile.columns, tile.column_count, &Place::to)) &&
         all(tile.columns, tile.column_count) && all(tile.lines, tile.line_count);
}

template <typename From, typename To>
void copy_plain_tile(const From* from, To* to, float scaling, const TileRange& tile, bool turned) {
  float values[kTile][kTile + 1];
  for (int l = 0; l < tile.line_count; ++l) {
    const From* const source = from + tile.lines[l].from + tile.columns[0].from;
    for (int c = 0; c < tile.column_count; ++c) values[l][c] = scaling * to_float(source[c]);
  }
  for (int c = 0; turned && c < tile.column_count; ++c) {
    To* const target = to + tile.lines[0].to + tile.columns[c].to;
    for (int l = 0; l < tile.line_count; ++l) store(values[l][c], target[l]);
  }
  for (int l = 0; !turned && l < tile.line_count; ++l) {
    To* const target = to + tile.lines[l].to + tile.columns[0].to;
    for (int c = 0; c < tile.column_count; ++c) store(values[l][c], target[c]);
  }
}

template <typename From, typename To>
void copy_tile(const From* from, To* to, float scaling, const TileRange& tile, const char* used,
               bool turned) {
  if (is_plain(tile, used, turned)) return copy_plain_tile(from, to, scaling, tile, turned);
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
  for (int i = 0; i < count; ++i) places[i] = place(side, first + i);
  return count;
}

}  // namespace
}  // namespace moegemm::cpu

namespace moegemm {

void copy_factors_on_cpu(std::span<const FactorCopy> copies, const TensorView& m_sizes,
                         const ExecutionContext& context) {
  using namespace cpu;
  for (const FactorCopy& copy : copies) {
    const std::int64_t experts = copy.to.shape[0];
    std::vector<char> flags(m_sizes.given() ? experts : 0);
    for (std::size_t e = 0; e < flags.size(); ++e) {
      flags[e] = read_index(m_sizes.data, m_sizes.dtype, static_cast<std::int64_t>(e)) > 0;
    }
    const char* const used = flags.empty() ? nullptr : flags.data();
    const FactorTiles tiles = factor_tiles(copy);
    const std::int64_t across = (tiles.columns.extent() + kTile - 1) / kTile;
    const std::int64_t count = across * ((tiles.lines.extent() + kTile - 1) / kTile);
    const auto run = [&]<typename From, typename To>(From*, To*) {
      for_each_range(context, count, kGrainTiles, [&](std::int64_t begin, std::int64_t end) {
        TileRange range;
        for (std::int64_t tile = begin; tile < end; ++tile) {
          range.column_count = fill(tiles.columns, tile % across * kTile, range.columns);
          range.line_count = fill(tiles.lines, tile / across * kTile, range.lines);
          copy_tile(static_cast<const From*>(copy.from.data), static_cast<To*>(copy.to.data),
                    copy.scaling, range, used, tiles.turned);
        }
      });
    };
    with_element_type(copy.from.dtype, [&]<typename From>(From* from) {
      with_element_type(copy.to.dtype, [&]<typename To>(To* to) { run(from, to); });
    });
  }
}

}  // namespace moegemm
