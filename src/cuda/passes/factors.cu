#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/factor_tiles.h"
#include "core/refusal.h"
#include "cuda/backend/launch.h"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"

/// Copies of low-rank factors, several in one launch. Where memory runs along one dimension in both
/// tensors a block copies a run of vectors, else it turns a tile of 64 x 64 in shared memory.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostCopies = 8;  ///< of a launch: their descriptions are kernel arguments
constexpr int kTile = 64;
constexpr int kVector = 4;
constexpr int kRunVectors = 4 * kThreads;  ///< of a block

struct Side {
  FastDivisor divisor;  ///< inner
  int inner;
  int extent;  ///< inner * outer
  int given_inner;
  int given_outer;
  std::int64_t from_inner, from_outer, to_inner, to_outer;
  bool inner_is_expert, outer_is_expert;
};

struct Copy {
  const void* from;
  void* to;
  DType from_dtype, to_dtype;
  float scaling;
  bool turned;
  bool vectors;     ///< four elements at a time (not turned), or two (turned, reading)
  bool to_vectors;  ///< two at a time (turned, writing)
  int across;       ///< tiles, or not turned vectors, of a line
  FastDivisor across_divisor;
  int units;  ///< of all lines
  int first_block;
  Side columns, lines;
};

struct Arguments {
  Copy copies[kMostCopies];
  int count;
  IndexArray sizes;
};

/// Where one line or column is.
struct Place {
  std::int64_t from;
  std::int64_t to;
  bool given;  ///< else zeros
  bool used;   ///< its expert has rows, or is the other side's
};

__device__ __forceinline__ Place place(const Side& side, int at, const IndexArray& sizes) {
  const int outer = static_cast<int>(side.divisor.divide(static_cast<unsigned>(at)));
  const int inner = at - outer * side.inner;
  Place found = {outer * side.from_outer + inner * side.from_inner,
                 outer * side.to_outer + inner * side.to_inner,
                 inner < side.given_inner && outer < side.given_outer, true};
  if (sizes.data && (side.inner_is_expert || side.outer_is_expert)) {
    found.used = load_index(sizes.data, sizes.is_64_bit, side.inner_is_expert ? inner : outer) > 0;
  }
  return found;
}

/// Count consecutive elements, by one access where `whole`.
template <int Count, typename T>
__device__ __forceinline__ void load_run(const T* source, bool whole, int left,
                                         float (&values)[Count]) {
  if (whole) {
    if constexpr (sizeof(T) == 4 && Count == 4) {
      const float4 quad = __ldcs(reinterpret_cast<const float4*>(source));
      values[0] = quad.x, values[1] = quad.y, values[2] = quad.z, values[3] = quad.w;
    } else if constexpr (sizeof(T) == 4) {
      const float2 pair = __ldcs(reinterpret_cast<const float2*>(source));
      values[0] = pair.x, values[1] = pair.y;
    } else {
#pragma unroll
      for (int i = 0; i < Count; i += 2) {
        const float2 pair = pair_to_float(reinterpret_cast<const unsigned*>(source)[i / 2], T());
        values[i] = pair.x, values[i + 1] = pair.y;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) values[i] = i < left ? to_float(source[i]) : 0.0f;
}

template <int Count, typename T>
__device__ __forceinline__ void store_run(T* target, bool whole, int left,
                                          const float (&values)[Count]) {
  if (whole) {
    if constexpr (sizeof(T) == 4 && Count == 4) {
      *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
    } else if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(target) = make_float2(values[0], values[1]);
    } else if constexpr (Count == 4) {
      *reinterpret_cast<uint2*>(target) =
          make_uint2(round_pair(values[0], values[1], T()), round_pair(values[2], values[3], T()));
    } else {
      *reinterpret_cast<unsigned*>(target) = round_pair(values[0], values[1], T());
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i < left) round_to(target[i], values[i]);
  }
}

/// Vectors of lines, in order.
template <typename From, typename To>
__device__ void copy_run(const Copy& copy, const IndexArray& sizes, int first) {
  constexpr int kEach = kRunVectors / kThreads;
  const From* const from = static_cast<const From*>(copy.from);
  To* const to = static_cast<To*>(copy.to);
  float values[kEach][kVector];
  Place lines[kEach];
  int columns[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int unit = first + i * kThreads + static_cast<int>(threadIdx.x);
    const int line = static_cast<int>(
        copy.across_divisor.divide(static_cast<unsigned>(min(unit, copy.units - 1))));
    columns[i] = (unit - line * copy.across) * kVector;
    lines[i] = place(copy.lines, line, sizes);
    if (unit >= copy.units) lines[i].used = false;
#pragma unroll
    for (float& value : values[i]) value = 0.0f;
    if (lines[i].used && lines[i].given) {
      load_run<kVector>(from + lines[i].from + columns[i], copy.vectors,
                        copy.columns.given_inner - columns[i], values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!lines[i].used) continue;
#pragma unroll
    for (float& value : values[i]) value *= copy.scaling;
    store_run<kVector>(to + lines[i].to + columns[i], copy.vectors, copy.columns.inner - columns[i],
                       values[i]);
  }
}

/// A tile, two elements of a thread at a time.
template <typename From, typename To>
__device__ void turn_tile(const Copy& copy, const IndexArray& sizes, int first_line,
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
      load_run<2>(from + line.from + columns[0].from, true, 2, values[i]);
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
      store_run<2>(to + column.to + lines[0].to, true, 2, turned);
    } else {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        if (lines[l].used) round_to(to[column.to + lines[l].to], turned[l]);
      }
    }
  }
}

/// Whether a tile has an expert with rows; by all threads of a block.
__device__ bool is_used(const Side& side, const IndexArray& sizes, int first) {
  if (!sizes.data || !(side.inner_is_expert || side.outer_is_expert)) return true;
  const int at = first + static_cast<int>(threadIdx.x) % kTile;
  return __syncthreads_or(at < side.extent && place(side, at, sizes).used) != 0;
}

template <typename From, typename To>
__device__ void copy_block(const Copy& copy, const IndexArray& sizes, int block,
                           float (&tile)[kTile][kTile + 1]) {
  if (!copy.turned) return copy_run<From, To>(copy, sizes, block * kRunVectors);
  const int line = static_cast<int>(copy.across_divisor.divide(static_cast<unsigned>(block)));
  const int first_line = line * kTile, first_column = (block - line * copy.across) * kTile;
  if (!is_used(copy.lines, sizes, first_line) || !is_used(copy.columns, sizes, first_column))
    return;
  turn_tile<From, To>(copy, sizes, first_line, first_column, tile);
}

__global__ void __launch_bounds__(kThreads)
    copy_factors_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ float tile[kTile][kTile + 1];
  int index = 0;
  while (index + 1 < arguments.count &&
         static_cast<int>(blockIdx.x) >= arguments.copies[index + 1].first_block) {
    ++index;
  }
  const Copy& copy = arguments.copies[index];
  const int block = static_cast<int>(blockIdx.x) - copy.first_block;
  with_format(FloatingFormats(), copy.from_dtype, [&]<DType From>() {
    with_format(FloatingFormats(), copy.to_dtype, [&]<DType To>() {
      copy_block<ElementType<From>, ElementType<To>>(copy, arguments.sizes, block, tile);
    });
  });
}

Side side_of(const FactorSide& side) {
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
  return reinterpret_cast<std::uintptr_t>(stack.data) % (elements * size_bytes(stack.dtype)) == 0;
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

/// Its description, and how many blocks it takes.
Copy describe(const FactorCopy& asked, std::int64_t& blocks) {
  const FactorTiles tiles = factor_tiles(asked);
  Copy copy = {};
  copy.from = asked.from.data;
  copy.to = asked.to.data;
  copy.from_dtype = asked.from.dtype;
  copy.to_dtype = asked.to.dtype;
  copy.scaling = asked.scaling;
  copy.turned = tiles.turned || !runs_along(tiles.columns);
  std::int64_t across = 0, units = 0;
  if (copy.turned) {
    copy.vectors = reads_vectors(asked, tiles, 2);
    copy.to_vectors = writes_vectors(asked, tiles.lines, tiles.columns, 2);
    across = blocks_of(tiles.columns.extent(), kTile);
    units = blocks = across * blocks_of(tiles.lines.extent(), kTile);
  } else {
    copy.vectors = reads_vectors(asked, tiles, kVector) &&
                   writes_vectors(asked, tiles.columns, tiles.lines, kVector);
    across = blocks_of(tiles.columns.extent(), kVector);
    units = across * tiles.lines.extent();
    blocks = blocks_of(units, kRunVectors);
  }
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 2 * kRunVectors;
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
}  // namespace moegemm::cuda

namespace moegemm {

void copy_factors_on_gpu(std::span<const FactorCopy> copies, const TensorView& m_sizes,
                         const ExecutionContext& context) {
  using namespace cuda;
  const PassLaunch on(copies.front().to.device, context);
  for (std::size_t first = 0; first < copies.size(); first += kMostCopies) {
    Arguments arguments = {};
    arguments.sizes = indices_of(m_sizes);
    std::int64_t total = 0;
    for (const FactorCopy& asked : copies.subspan(first)) {
      if (arguments.count == kMostCopies) break;
      std::int64_t blocks = 0;
      Copy copy = describe(asked, blocks);
      copy.first_block = static_cast<int>(total);
      arguments.copies[arguments.count++] = copy;
      total += blocks;
    }
    void* parameters[] = {&arguments};
    launch({reinterpret_cast<const void*>(&copy_factors_kernel), "copy_factors",
            dim3(static_cast<unsigned>(total)), dim3(kThreads)},
           parameters, on.stream);
  }
}

}  // namespace moegemm
