#pragma once

#include <cstdint>

#include "cuda/device/activation_math.cuh"
#include "cuda/passes/activation/gate_packs.cuh"
#include "cuda/passes/activation/row_experts.cuh"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/thread_ring.cuh"

/// What the kernels of an activation's gradient do to one row, or to some of them: see backward.cu.
namespace moegemm::cuda::activation_gradient {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// Of 64 registers each. Older GPUs take a few more, and three blocks fit; fp32 takes some 100.
constexpr int kBlocksPerMultiprocessor = 4;
template <typename T>
constexpr int least_resident_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return 3;
#else
  return sizeof(T) == 2 ? kBlocksPerMultiprocessor : 2;
#endif
}
/// The same for segments anywhere, whose loop keeps more.
template <typename T>
constexpr int least_resident_segment_blocks() {
  return sizeof(T) == 2 ? least_resident_blocks<T>() - 1 : 1;
}
/// 144 bytes in flight for each of 1024 threads on a multiprocessor: five times what hides the
/// latency of HBM (4.2 TB/s * 0.9 us over 132 of them: 29 KB each), so that warps may compute. With
/// more, what a block looks up before its first row waits longer in line.
constexpr int kStages = 3;
/// Strips of a block, unless one row has more. Blocks look up their rows and add m_sizes before the
/// first of them, and with a bias a warp should meet its columns in some rows; but with few strips
/// what all blocks work on at one time lies close together, and the last of them end together. Over
/// six models an H200 reached 0.92 to 0.96 of its copy bandwidth with 48, 0.89 to 0.96 with 96 and
/// 0.64 to 0.96 with 16.
constexpr int kStripsOfBlock = 48;
constexpr int kMostRows = kStripsOfBlock;
static_assert(kMostRows <= kThreads);  // each is looked up by a thread of its own
constexpr int kMostStrips = 4096;      // of a row: dot products are kept in shared memory

struct BackwardArguments {
  Floats pre;
  Floats bias;  // of pre's dtype, as d_out and down_bias
  Floats d_act;
  Floats d_out;
  Floats down_bias;
  Floats d_pre;
  Floats weighted_act;
  Floats d_weights;           // [flat_rows]
  Floats weights;             // [flat_rows]
  IndexArray gather_indices;  // [rows], or null
  SegmentParams segments;
  int rows;
  int flat_rows;  // indices are below it
  int topk;
  int activated;
  int hidden;
  int hidden_strips;  // of d_out and down_bias by 16-byte accesses; 0: none, or element by element
  int group_rows;     // consecutive rows of a block
  int strips;         // in a row
  Activation activation;
  GateColumns columns;
};

/// What a block knows of one of its rows.
struct Row {
  int flat;   // -1: zero in every output
  int token;  // of d_out
  int expert;
  float weight;
};

/// The index of a row, as it was loaded.
__device__ __forceinline__ IndexArray::Fetched fetch_index(const BackwardArguments& a,
                                                           int position) {
  if (a.gather_indices.data) return a.gather_indices.fetch(position);
  return {.low = static_cast<unsigned>(position), .high = 0};
}

/// The parts of a row that do not depend on m_sizes.
__device__ __forceinline__ Row look_up(const BackwardArguments& a, int flat) {
  Row row = {flat, flat / a.topk, 0, 1.0f};
  if (row.flat >= 0 && a.weights.data) row.weight = a.weights.load(row.flat);
  return row;
}

/// The rest of it.
__device__ __forceinline__ void place(const BackwardArguments& a, const int* row_prefix,
                                      int position, Row& row) {
  if (position >= row_prefix[a.segments.experts]) {
    row.flat = -1;
  } else if (a.bias.data || a.down_bias.data) {
    row.expert = expert_of(row_prefix, a.segments.experts, position);
  }
}

/// Where a row starts. In 32 bits a stride is one instruction.
__device__ __forceinline__ std::int64_t start_of(int row, const Floats& matrix) {
  return std::int64_t{row} * static_cast<int>(matrix.stride);
}

/// This lane's part of <d_out[token], down_bias[expert]>, element by element.
__device__ inline float bias_share(const BackwardArguments& a, const Row& row) {
  const std::int64_t d_out = row.token * a.d_out.stride;
  const std::int64_t bias = row.expert * a.down_bias.stride;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < a.hidden; c += 32) {
    sum = fmaf(a.d_out.load(d_out + c), a.down_bias.load(bias + c), sum);
  }
  return sum;
}

/// A lane's place in its warp's share of the strips of a block's rows: down the rows of one strip,
/// then of the next. What depends on the column is at hand for the next row then, as the bias is.
struct Cursor {
  int row;
  int column;

  __device__ __forceinline__ void advance(int rows) {
    if (++row == rows) {
      row = 0;
      column += kStripColumns;
    }
  }
};

/// <d_out[token], down_bias[expert]> of each strip of 256 columns and each of a block's rows. A
/// warp goes down the rows of a strip, whose experts are the same for the most part: the bias then
/// comes from L1.
template <typename T>
__device__ __forceinline__ void dot_biases(const BackwardArguments& a, const Row* rows, int count,
                                           float* dots) {
  constexpr int kTogether = 3;  // in flight
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tasks = count * a.hidden_strips;
  const int begin = tasks * warp / kWarps, end = tasks * (warp + 1) / kWarps;
  Cursor at = {begin % count, begin / count * kStripColumns + lane * kPackElems};
  for (int task = begin; task < end; task += kTogether) {
    Pack<T> gradients[kTogether] = {}, biases[kTogether] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j, at.advance(count)) {
      const Row row = rows[at.row];
      if (task + j < end && row.flat >= 0 && at.column < a.hidden) {
        gradients[j] = load_shared_pack(static_cast<const T*>(a.d_out.data) +
                                        start_of(row.token, a.d_out) + at.column);
        biases[j] = load_shared_pack(static_cast<const T*>(a.down_bias.data) +
                                     start_of(row.expert, a.down_bias) + at.column);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      float gradient[kPackElems], value[kPackElems], sum = 0.0f;
      unpack(gradients[j], gradient);
      unpack(biases[j], value);
#pragma unroll
      for (int i = 0; i < kPackElems; ++i) {
        sum = fmaf(gradient[i], value[i], sum);
      }
      sum = warp_sum(sum);
      if (lane == 0 && task + j < end) dots[task + j] = sum;
    }
  }
}

template <typename T, GateLayout L>
using Ring = ThreadRing<T, GatePacks<T, L>::kPacks + 1, kThreads, kStages>;

/// The elements of a lane in one part of its strip, from its first column on: makes and stores
/// their gradients and weighted values, and returns `sum` + <d_act, act>.
template <ActivationFunction F, typename T, GateLayout L>
__device__ __forceinline__ float backward_part(const BackwardArguments& a, const Row& row,
                                               int position, int part, int column,
                                               const GatePacks<T, L>& packs,
                                               const GatePacks<T, L>& bias,
                                               const Pack<T>& gradients, float sum) {
  using Packs = GatePacks<T, L>;
  float gate[Packs::kElems] = {}, up[Packs::kElems] = {}, gradient[Packs::kElems] = {};
  if (row.flat >= 0) {
    packs.split(part, gate, up);
    Packs::split_activated(gradients, part, gradient);
    if (a.bias.data) bias.add_to(part, gate, up);
#pragma unroll
    for (int i = 0; i < Packs::kElems; ++i) {
      const Activated value =
          evaluate<F, Packs::kGated>(a.activation, gate[i], Packs::kGated ? up[i] : 0.0f);
      sum = fmaf(gradient[i], value.act, sum);
      const float weighted = row.weight * gradient[i];
      gate[i] = weighted * value.d_gate;
      if constexpr (Packs::kGated) up[i] = weighted * value.d_up;
      gradient[i] = row.weight * value.act;
    }
  }
  Packs::store(a.d_pre.data, a.d_pre.dtype == DType::kFloat32, start_of(position, a.d_pre), column,
               a.activated, gate, up);
  if (a.weighted_act.data) {
    Packs::store_activated(a.weighted_act.data, a.weighted_act.dtype == DType::kFloat32,
                           start_of(position, a.weighted_act), column, gradient);
  }
  return sum;
}

/// The weights' gradients of a block's rows, from the dot products of their strips.
__device__ __forceinline__ void store_d_weights(const BackwardArguments& a, const Row* rows,
                                                int count, const float* dots) {
  const auto dot = [&](int r) {
    float sum = 0.0f;
    for (int strip = 0; strip < a.strips + a.hidden_strips; ++strip) {
      sum += dots[strip * count + r];
    }
    return sum;
  };
  if (!a.down_bias.data || a.hidden_strips > 0) {
    const int r = static_cast<int>(threadIdx.x);
    if (r < count && rows[r].flat >= 0) a.d_weights.store(rows[r].flat, dot(r));
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = warp; r < count; r += kWarps) {
    const Row row = rows[r];
    if (row.flat < 0) continue;
    const float share = warp_sum(bias_share(a, row));
    if (lane == 0) a.d_weights.store(row.flat, dot(r) + share);
  }
}

}  // namespace moegemm::cuda::activation_gradient
