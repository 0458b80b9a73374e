#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/factor_tiles.h"
#include "cpu/element_type.h"
#include "cpu/parallel.h"
#include "cpu/routing_data.h"

/// Where memory runs along the columns in both tensors, line after line. Else tiles of kTile lines
/// by kTile columns, read along the memory of `from` into a buffer and written along that of `to`.
namespace moegemm::cpu {
namespace {

/// 512 bytes of fp32 at a time, so that memory's pages change seldom. The buffer is 64 KB, and
/// stays in the second cache.
constexpr std::int64_t kTile = 128;
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

/// Nothing is left out, and memory has no gap on either way: loops that compilers vectorise.
bool is_plain(const TileRange& tile, const char* used) {
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
         runs(tile.lines, tile.line_count, &Place::to) && all(tile.columns, tile.column_count) &&
         all(tile.lines, tile.line_count);
}

/// Elements of neighbouring lines in words of 64 bits, as they follow one another in `to`: what is
/// turned then are words, in loops without arithmetic.
template <typename To, typename From>
void round_lines(const From* const (&sources)[8 / sizeof(To)], float scaling, int columns,
                 std::uint64_t* words) {
  using Bits = std::conditional_t<sizeof(To) == 4, std::uint32_t, std::uint16_t>;
  constexpr int kLines = 8 / sizeof(To);
  Bits rounded[kLines][kTile];
  for (int l = 0; l < kLines; ++l) {
    for (int c = 0; c < columns; ++c) {
      To one;
      store(scaling * to_float(sources[l][c]), one);
      rounded[l][c] = std::bit_cast<Bits>(one);
    }
  }
  for (int c = 0; c < columns; ++c) {
    std::uint64_t word = 0;
    for (int l = 0; l < kLines; ++l) word |= std::uint64_t{rounded[l][c]} << (l * 8 * sizeof(To));
    words[c] = word;
  }
}
static_assert(std::endian::native == std::endian::little, "the first line has the low bits");

template <typename From, typename To>
void turn_plain_tile(const From* from, To* to, float scaling, const TileRange& tile) {
  constexpr int kLines = 8 / sizeof(To);  // of a word
  std::uint64_t words[kTile / kLines][kTile + 1];
  const From* const first = from + tile.columns[0].from;
  const int groups = tile.line_count / kLines;
  for (int g = 0; g < groups; ++g) {
    const From* sources[kLines];
    for (int l = 0; l < kLines; ++l) sources[l] = first + tile.lines[g * kLines + l].from;
    round_lines<To>(sources, scaling, tile.column_count, words[g]);
  }
  for (int c = 0; c < tile.column_count; ++c) {
    To* const target = to + tile.lines[0].to + tile.columns[c].to;
    for (int g = 0; g < groups; ++g) std::memcpy(target + g * kLines, &words[g][c], 8);
    for (int l = groups * kLines; l < tile.line_count; ++l) {
      store(scaling * to_float(first[tile.lines[l].from + c]), target[l]);
    }
  }
}

template <typename From, typename To>
void copy_tile(const From* from, To* to, float scaling, const TileRange& tile, const char* used,
               bool turned) {
  if (turned && is_plain(tile, used)) return turn_plain_tile(from, to, scaling, tile);
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
    for (std::int64_t c = 0; c < given; ++c) store(scaling * to_float(source[c]), target[c]);
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
    const bool run = is_run(tiles);
    const auto tiles_of = [](const FactorSide& side) {
      return (side.extent() + kTile - 1) / kTile;
    };
    const std::int64_t count =
        run ? tiles.lines.extent() : tiles_of(tiles.columns) * tiles_of(tiles.lines);
    const std::int64_t grain =
        run ? std::max<std::int64_t>(1, kGrainElems / tiles.columns.inner) : kGrainTiles;
    with_element_type(copy.from.dtype, [&]<typename From>(From*) {
      with_element_type(copy.to.dtype, [&]<typename To>(To*) {
        const auto part = run ? &copy_lines<From, To> : &copy_tiles<From, To>;
        for_each_range(context, count, grain, [&](std::int64_t begin, std::int64_t end) {
          part(copy, tiles, used, begin, end);
        });
      });
    });
  }
}

}  // namespace moegemm
