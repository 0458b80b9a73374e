#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/factor_tiles.h"
#include "core/refusal.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/passes/early_start.cuh"
#include "cuda/passes/factors/copy_params.h"
#include "cuda/passes/factors/turn_vectors.cuh"
#include "cuda/passes/passes.h"

/// Copies of low-rank factors, several in one launch. Where memory runs along one dimension in both
/// tensors a block copies a run of vectors, else it turns a tile in shared memory.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = kCopyThreads;
constexpr int kRunVectors = 4 * kThreads;  ///< of a block

/// Up to eight elements one by one, where rows do not lie in multiples of 16 bytes.
template <typename From, typename To>
__device__ __forceinline__ void copy_elements(const From* from, To* to, int given, int count,
                                              float scaling) {
  float values[kPackElems];
#pragma unroll
  for (int i = 0; i < kPackElems; ++i) values[i] = i < given ? to_float(from[i]) : 0.0f;
#pragma unroll
  for (int i = 0; i < kPackElems; ++i) {
    if (i < count) round_to(to[i], values[i] * scaling);
  }
}

/// Vectors of lines, in order.
template <typename From, typename To>
__device__ void copy_run(const CopyParams& copy, const IndexArray& sizes, int first) {
  constexpr int kEach = kRunVectors / kThreads;
  const From* const from = static_cast<const From*>(copy.from);
  To* const to = static_cast<To*>(copy.to);
  Pack<From> packs[kEach];
  std::int64_t targets[kEach];
  bool used[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int unit = first + i * kThreads + static_cast<int>(threadIdx.x);
    const int line = static_cast<int>(
        copy.across_divisor.divide(static_cast<unsigned>(min(unit, copy.units - 1))));
    const int column = (unit - line * copy.across) * kPackElems;
    const Place at = place(copy.lines, line, sizes);
    used[i] = at.used && unit < copy.units;
    targets[i] = at.to + column;
    packs[i] = {};
    if (!used[i]) continue;
    if (copy.vectors) {
      if (at.given) packs[i] = load_pack(from + at.from + column);
    } else {
      const int given = at.given ? copy.columns.given_inner : 0;
      copy_elements(from + at.from + column, to + at.to + column, given - column,
                    copy.columns.inner - column, copy.scaling);
    }
  }
  if (!copy.vectors) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!used[i]) continue;
    float values[kPackElems];
    unpack(packs[i], values);
#pragma unroll
    for (float& value : values) value *= copy.scaling;
    store_pack_as(to + targets[i], values);
  }
}

template <typename T>
__device__ __forceinline__ float2 load_pair(const T* source) {
  if constexpr (sizeof(T) == 4) {
    return __ldcs(reinterpret_cast<const float2*>(source));
  } else {
    return pair_to_float(*reinterpret_cast<const unsigned*>(source), T());
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(T* target, float first, float second) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(target) = make_float2(first, second);
  } else {
    *reinterpret_cast<unsigned*>(target) = round_pair(first, second, T());
  }
}

/// A tile, two elements of a thread at a time.
template <typename From, typename To>
__device__ void turn_tile(const CopyParams& copy, const IndexArray& sizes, int first_line,
                          int first_column, float (&tile)[kTile][kTile + 1]) {
  constexpr int kStep = kThreads / (kTile / 2);  // lines, or columns, at a time
  constexpr int kEach = kTile / kStep;
  const int pair = static_cast<int>(threadIdx.x) % (kTile / 2) * 2;
  const int own = static_cast<int>(threadIdx.x) / (kTile / 2);
  const int column_end = copy.columns.extent, line_end = copy.lines.extent;
  const From* const from = static_cast<const From*>(copy.from);
  Place columns[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    columns[i] = place(copy.columns, min(first_column + pair + i, column_end - 1), sizes);
    if (first_column + pair + i >= column_end) columns[i].used = false;
  }
  float values[kEach][2];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int line_at = first_line + own + i * kStep;
    const Place line = place(copy.lines, min(line_at, line_end - 1), sizes);
    values[i][0] = values[i][1] = 0.0f;
    if (line_at >= line_end || !line.used || !line.given) continue;
    if (copy.vectors && columns[0].used && columns[1].used && columns[0].given) {
      const float2 both = load_pair(from + line.from + columns[0].from);
      values[i][0] = both.x, values[i][1] = both.y;
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (columns[c].used && columns[c].given) {
          values[i][c] = to_float(from[line.from + columns[c].from]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    tile[own + i * kStep][pair] = values[i][0] * copy.scaling;
    tile[own + i * kStep][pair + 1] = values[i][1] * copy.scaling;
  }
  __syncthreads();
  To* const to = static_cast<To*>(copy.to);
  Place lines[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    lines[i] = place(copy.lines, min(first_line + pair + i, line_end - 1), sizes);
    if (first_line + pair + i >= line_end) lines[i].used = false;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column_at = first_column + own + i * kStep;
    const Place column = place(copy.columns, min(column_at, column_end - 1), sizes);
    if (column_at >= column_end || !column.used) continue;
    const float turned[2] = {tile[pair][own + i * kStep], tile[pair + 1][own + i * kStep]};
    if (copy.to_vectors && lines[0].used && lines[1].used) {
      store_pair(to + column.to + lines[0].to, turned[0], turned[1]);
    } else {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        if (lines[l].used) round_to(to[column.to + lines[l].to], turned[l]);
      }
    }
  }
}

/// Whether a tile has an expert with rows; by all threads of a block.
__device__ bool is_used(const CopySide& side, const IndexArray& sizes, int first) {
  if (!sizes.data || !(side.inner_is_expert || side.outer_is_expert)) return true;
  const int at = first + static_cast<int>(threadIdx.x) % kTile;
  return __syncthreads_or(at < side.extent && place(side, at, sizes).used) != 0;
}

struct Shared {
  union {
    float tile[kTile][kTile + 1];
    uint4 turned[kTurnBytes / 16];
  };
  alignas(8) unsigned char flags[kMostFlags];
};

template <typename From, typename To>
__device__ void copy_block(const CopyParams& copy, const IndexArray& sizes, int block,
                           Shared& shared) {
  if (copy.way == CopyWay::kRun) return copy_run<From, To>(copy, sizes, block * kRunVectors);
  const int line = static_cast<int>(copy.across_divisor.divide(static_cast<unsigned>(block)));
  const int column = block - line * copy.across;
  if (copy.way == CopyWay::kTurnVectors) {
    return turn_vectors<From, To>(copy, sizes, line << (kTurnLog - copy.log_columns),
                                  column << copy.log_columns,
                                  reinterpret_cast<unsigned*>(shared.turned), shared.flags);
  }
  const int first_line = line * kTile, first_column = column * kTile;
  if (!is_used(copy.lines, sizes, first_line) || !is_used(copy.columns, sizes, first_column))
    return;
  turn_tile<From, To>(copy, sizes, first_line, first_column, shared.tile);
}

__global__ void __launch_bounds__(kThreads, 4)
    copy_factors_kernel(const __grid_constant__ CopyArguments arguments) {
  __shared__ Shared shared;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  int index = 0;
  while (index + 1 < arguments.count &&
         static_cast<int>(blockIdx.x) >= arguments.copies[index + 1].first_block) {
    ++index;
  }
  const CopyParams& copy = arguments.copies[index];
  const int block = static_cast<int>(blockIdx.x) - copy.first_block;
  with_format(FloatingFormats(), copy.from_dtype, [&]<DType From>() {
    with_format(FloatingFormats(), copy.to_dtype, [&]<DType To>() {
      copy_block<ElementType<From>, ElementType<To>>(copy, arguments.sizes, block, shared);
    });
  });
}

CopySide side_of(const FactorSide& side) {
  return {make_fast_divisor(static_cast<std::uint32_t>(side.inner)),
          static_cast<int>(side.inner),
          static_cast<int>(side.extent()),
          static_cast<int>(side.given_inner),
          static_cast<int>(side.given_outer),
          side.from_inner,
          side.from_outer,
          side.to_inner,
          side.to_outer,
          side.inner_is_expert,
          side.outer_is_expert};
}

bool divides(std::int64_t step, std::initializer_list<std::int64_t> values) {
  return std::all_of(values.begin(), values.end(),
                     [&](std::int64_t value) { return value % step == 0; });
}

bool is_aligned(const StridedStack& stack, std::int64_t elements) {
  const std::int64_t bytes = std::min<std::int64_t>(elements * size_bytes(stack.dtype), 16);
  return reinterpret_cast<std::uintptr_t>(stack.data) % bytes == 0;
}

/// Its elements lie side by side in both tensors; a tile that is turned may have any strides.
bool runs_along(const FactorSide& columns) {
  return columns.inner == 1 || (columns.from_inner == 1 && columns.to_inner == 1);
}

/// Vectors of `count` elements along the columns never cross an edge and are aligned, in `from`.
bool reads_vectors(const FactorCopy& copy, const FactorTiles& tiles, std::int64_t count) {
  return tiles.columns.from_inner == 1 && is_aligned(copy.from, count) &&
         divides(count, {tiles.columns.inner, tiles.columns.given_inner, tiles.columns.from_outer,
                         tiles.lines.from_inner, tiles.lines.from_outer});
}

/// The same along `along`, in `to`.
bool writes_vectors(const FactorCopy& copy, const FactorSide& along, const FactorSide& other,
                    std::int64_t count) {
  return along.to_inner == 1 && is_aligned(copy.to, count) &&
         divides(count, {along.inner, along.to_outer, other.to_inner, other.to_outer});
}

std::int64_t blocks_of(std::int64_t count, std::int64_t each) { return (count + each - 1) / each; }

/// Elements of an access of 16 bytes.
std::int64_t vector_of(const StridedStack& stack) { return 16 / size_bytes(stack.dtype); }

/// Rows that follow one another in both tensors, as one row: a run need not end with each.
void join_rows(FactorTiles& tiles) {
  FactorSide &columns = tiles.columns, &lines = tiles.lines;
  const std::int64_t length = columns.inner;
  if (lines.inner_is_expert || lines.from_inner != length || lines.to_inner != length ||
      columns.given_inner != length || lines.given_inner != lines.inner) {
    return;
  }
  columns.inner = columns.given_inner = length * lines.inner;
  lines.inner = lines.given_inner = 1;
  lines.from_inner = lines.to_inner = 0;
}

/// Whether 16 bytes along the columns and 16 along the lines never cross an edge. A tile stores a
/// line's expert whole: it leaves none out of a vector.
bool turns_vectors(const FactorCopy& copy, const FactorTiles& tiles, bool with_sizes) {
  return tiles.columns.given_inner == tiles.columns.inner &&
         tiles.columns.given_outer == tiles.columns.outer &&
         !(with_sizes && tiles.lines.inner_is_expert) &&
         reads_vectors(copy, tiles, vector_of(copy.from)) &&
         writes_vectors(copy, tiles.lines, tiles.columns, vector_of(copy.to));
}

/// log2 of the columns of a vector tile: 64, and 128 lines, unless a side has fewer. At least eight
/// of each: a load of 16-bit columns, a chunk of 16-bit lines.
int log_columns_for(const FactorTiles& tiles) {
  const auto covers = [](std::int64_t extent, int log) { return extent <= std::int64_t{1} << log; };
  int log = 6;
  while (log > 3 && covers(tiles.columns.extent(), log - 1)) --log;
  while (log < kTurnLog - 3 && covers(tiles.lines.extent(), kTurnLog - log - 1)) ++log;
  return log;
}

/// Its description, and how many blocks it takes.
CopyParams describe(const FactorCopy& asked, bool with_sizes, std::int64_t& blocks) {
  FactorTiles tiles = factor_tiles(asked);
  CopyParams copy = {};
  copy.from = asked.from.data;
  copy.to = asked.to.data;
  copy.from_dtype = asked.from.dtype;
  copy.to_dtype = asked.to.dtype;
  copy.scaling = asked.scaling;
  std::int64_t across = 0, units = 0;
  if (!tiles.turned && runs_along(tiles.columns)) {
    copy.way = CopyWay::kRun;
    join_rows(tiles);
    copy.vectors = reads_vectors(asked, tiles, kPackElems) &&
                   writes_vectors(asked, tiles.columns, tiles.lines, kPackElems);
    across = blocks_of(tiles.columns.extent(), kPackElems);
    units = across * tiles.lines.extent();
    blocks = blocks_of(units, kRunVectors);
  } else {
    std::int64_t columns = kTile, lines = kTile;
    if (turns_vectors(asked, tiles, with_sizes)) {
      copy.way = CopyWay::kTurnVectors;
      copy.log_columns = static_cast<std::int8_t>(log_columns_for(tiles));
      columns = std::int64_t{1} << copy.log_columns;
      lines = std::int64_t{1} << (kTurnLog - copy.log_columns);
    } else {
      copy.way = CopyWay::kTurn;
      copy.vectors = reads_vectors(asked, tiles, 2);
      copy.to_vectors = writes_vectors(asked, tiles.lines, tiles.columns, 2);
    }
    across = blocks_of(tiles.columns.extent(), columns);
    units = blocks = across * blocks_of(tiles.lines.extent(), lines);
  }
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - (1 << kTurnLog);
  if (units > kMost || tiles.columns.extent() > kMost || tiles.lines.extent() > kMost) {
    throw Error(ErrorKind::kNotImplemented,
                join("a factor of ", asked.to.shape[0], " x ", asked.to.shape[1], " x ",
                     asked.to.shape[2], " elements is too large to copy on a GPU"));
  }
  copy.across = static_cast<int>(across);
  copy.units = static_cast<int>(units);
  copy.across_divisor = make_fast_divisor(static_cast<std::uint32_t>(across));
  copy.columns = side_of(tiles.columns);
  copy.lines = side_of(tiles.lines);
  return copy;
}

}  // namespace

void CudaPasses::copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes,
                              const ExecutionContext& context) const {
  const Device device = copies.front().to.device;
  const PassLaunch on(device, context);
  struct Launch {
    CopyArguments arguments = {};
    std::int64_t blocks = 0;
  };
  std::vector<Launch> launches((copies.size() + kMostCopies - 1) / kMostCopies);
  for (std::size_t at = 0; at < copies.size(); ++at) {  // all before the first is launched
    auto& [arguments, total] = launches[at / kMostCopies];
    std::int64_t blocks = 0;
    CopyParams copy = describe(copies[at], m_sizes.given(), blocks);
    copy.first_block = static_cast<int>(total);
    arguments.sizes = indices_of(m_sizes);
    arguments.copies[arguments.count++] = copy;
    total += blocks;
  }
  for (auto& [arguments, total] : launches) {
    void* parameters[] = {&arguments};
    launch({reinterpret_cast<const void*>(&copy_factors_kernel), "copy_factors",
            dim3(static_cast<unsigned>(total)), dim3(kThreads), 0,
            starts_early<__CUDA_ARCH_LIST__>(device, context)},
           parameters, on.stream);
  }
}

}  // namespace moegemm::cuda
