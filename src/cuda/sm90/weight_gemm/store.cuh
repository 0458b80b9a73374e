#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/weight_gemm/params.h"

/// The store role of the dW kernel: a warpgroup's block of 64 A columns by BCols B columns, from
/// accumulators through a staging buffer of its own to a tensor-map store, which clips at the
/// edges of dW.
///
/// Accumulator 4 j + 2 h + i of a lane is A column 16 * warp + lane / 4 + 8 h, B column
/// 8 j + 2 (lane % 4) + i. dW is [N, K]: if A is X, the columns of A run along the output rows and
/// the block is transposed on its way into the staging buffer; else it is stored as it is. Either
/// way the buffer holds slabs of 64 output rows by 128 bytes, 128-byte swizzled.
namespace moegemm::cuda::sm90 {

template <typename Traits>
class WeightStore {
 public:
  static constexpr int kAccumulators = Traits::kBCols / 2;
  static constexpr int kSlabOutputRows = 64;
  static constexpr int kSlabBytes = kSlabOutputRows * 128;

  __device__ __forceinline__ WeightStore(const WeightGemmParams& params,
                                         WeightGemmShared<Traits>& shared, int group)
      : params_(params),
        staging_(shared.staging[group]),
        old_full_(&shared.old_full[group]),
        group_(group) {}

  /// packed[2 j + h] holds accumulators 4 j + 2 h and the next. A narrow tile leaves the rest as it
  /// is: those columns are beyond the edge of dW.
  template <int Count>
  static __device__ __forceinline__ void pack(const float (&acc)[Count],
                                              std::uint32_t (&packed)[kAccumulators / 2]) {
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      packed[i] = round_pair(acc[2 * i], acc[2 * i + 1], typename Traits::Element{});
    }
  }

  /// Stores block 0 or 1 of the warpgroup in the input type.
  __device__ __forceinline__ void store_packed(const std::uint32_t (&packed)[kAccumulators / 2],
                                               const WeightTile& tile, int block) const {
    begin();
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize;
    const std::uint32_t staging = ptx::shared_address(staging_);
    if (params_.a_is_x) {
      // Output rows 8 j .. 8 j + 15 (B columns), this warp's two 16-byte chunks of each.
      const std::uint32_t target =
          staging + swizzle_128b(lane % 8 + 8 * (lane / 16), warp * 2 + lane / 8 % 2);
#pragma unroll
      for (int j = 0; j < Traits::kBCols / 8; j += 2) {
        ptx::stmatrix_x4_trans(target + j * 1024, packed[2 * j], packed[2 * j + 1],
                               packed[2 * j + 2], packed[2 * j + 3]);
      }
    } else {
      // This warp's 16 output rows (A columns), chunks j and j + 1 of each.
      const std::uint32_t target = staging + swizzle_128b(warp * 16 + lane % 16, lane / 16);
#pragma unroll
      for (int j = 0; j < Traits::kBCols / 8; j += 2) {
        ptx::stmatrix_x4((target + j / 8 * kSlabBytes) ^ (j % 8 << 4), packed[2 * j],
                         packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
      }
    }
    end(tile, block, 0, kSlabCols);
  }

  /// Stores block 0 or 1 in fp32 (or adds it): twice the bytes, so in two halves.
  __device__ __forceinline__ void store_float(const float (&acc)[kAccumulators],
                                              const WeightTile& tile, int block) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      begin();
      if (adds() && !adds_in_l2(tile, block)) {
        load_old(tile, block, half);
        stage_half<true>(acc, half);
      } else {
        stage_half<false>(acc, half);
      }
      end(tile, block, half, kSlabFloats, adds() && adds_in_l2(tile, block));
    }
  }

  /// dW +=: brings what is there into L2 while the tile multiplies.
  __device__ __forceinline__ void prefetch_old(const WeightTile& tile) const {
    if (!adds() || !leads()) return;
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      const int block = part / 2;
      if (adds_in_l2(tile, block)) continue;
      for_each_slab(tile, block, part % 2, kSlabFloats, [&](int, int col, int row) {
        ptx::cp_async_bulk_prefetch_tensor_3d(&params_.out_map, col, row, tile.expert);
      });
    }
  }

  /// Until the last store has left shared memory, which must outlive it.
  __device__ __forceinline__ void finish() const {
    if (leads()) ptx::cp_async_bulk_wait_group_read<0>();
  }

 private:
  static constexpr int kSlabFloats = 32;
  static constexpr int kSlabs = Traits::kStagingBytes / kSlabBytes;

  __device__ __forceinline__ bool leads() const { return threadIdx.x % kWarpgroupThreads == 0; }
  __device__ __forceinline__ bool adds() const {
    return params_.output == WeightOutput::kAddToFloat32;
  }
  /// Who adds to dW: L2, which costs this kernel nothing but manages only 1.2 TB/s, or this
  /// warpgroup, which waits for the old values. Half and half keeps both busy; tiles that multiply
  /// long enough leave it all to L2.
  static __device__ __forceinline__ bool adds_in_l2(const WeightTile& tile, int block) {
    return block == 0 || tile.rows >= 1024;
  }
  /// Barrier 0 is __syncthreads'.
  __device__ __forceinline__ void sync() const { ptx::bar_sync(1 + group_, kWarpgroupThreads); }

  /// The staging buffer is free.
  __device__ __forceinline__ void begin() const {
    if (leads()) ptx::cp_async_bulk_wait_group_read<0>();
    sync();
  }

  /// Calls body(slab, first column, first row of dW) for each slab of the staging buffer.
  template <typename Body>
  __device__ __forceinline__ void for_each_slab(const WeightTile& tile, int block, int half,
                                                int slab_cols, const Body& body) const {
    const bool a_is_x = params_.a_is_x;
    const int a_col = tile.a_col + (group_ * 2 + block) * kSlabCols;
    const int col = a_is_x ? a_col + half * slab_cols : tile.b_col + half * kSlabs * slab_cols;
    const int row = a_is_x ? tile.b_col : a_col;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      body(slab, a_is_x ? col : col + slab * slab_cols,
           a_is_x ? row + slab * kSlabOutputRows : row);
    }
  }

  /// Fills the staging buffer with what dW holds.
  __device__ __forceinline__ void load_old(const WeightTile& tile, int block, int half) {
    if (leads()) {
      ptx::mbarrier_arrive_expect_tx(old_full_, Traits::kStagingBytes);
      for_each_slab(tile, block, half, kSlabFloats, [&](int slab, int col, int row) {
        ptx::cp_async_bulk_tensor_3d(staging_ + slab * kSlabBytes, &params_.out_map, col, row,
                                     tile.expert, old_full_);
      });
    }
    ptx::mbarrier_wait(old_full_, old_phase_);
    old_phase_ ^= 1;
  }

  /// Writes half of a block's accumulators to the staging buffer, or adds them to it.
  template <bool Add>
  __device__ __forceinline__ void stage_half(const float (&acc)[kAccumulators], int half) const {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize;
    if (params_.a_is_x) {
      // All output rows (B columns), floats 32 * half .. + 31 (A columns) of each: two warps'.
      if (warp / 2 != half) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int col = warp % 2 * 16 + lane / 4 + i / 2 * 8;
        unsigned char* target =
            staging_ + swizzle_128b(lane % 4 * 2 + i % 2, col / 4) + col % 4 * 4;
#pragma unroll
        for (int j = 0; j < Traits::kBCols / 8; ++j) {
          auto& element = *reinterpret_cast<float*>(target + j * 1024);
          element = Add ? element + acc[4 * j + i] : acc[4 * j + i];
        }
      }
    } else {
      // All output rows (A columns), half of the B columns in slabs of 32: 8 chunks of 16 bytes,
      // two for each j.
      const int target = swizzle_128b(warp * 16 + lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < kAccumulators / 2; i += 2) {
        const int j = i / 4;
        const int offset = (target ^ (j % 4 * 2 << 4)) + j / 4 * kSlabBytes + i / 2 % 2 * 1024;
        auto& pair = *reinterpret_cast<float2*>(staging_ + offset);
        const float low = half == 0 ? acc[i] : acc[kAccumulators / 2 + i];
        const float high = half == 0 ? acc[i + 1] : acc[kAccumulators / 2 + i + 1];
        pair = Add ? make_float2(pair.x + low, pair.y + high) : make_float2(low, high);
      }
    }
  }

  /// The staging buffer is full: one thread stores it, slab by slab.
  __device__ __forceinline__ void end(const WeightTile& tile, int block, int half, int slab_cols,
                                      bool add = false) const {
    ptx::fence_proxy_async_shared();
    sync();
    if (!leads()) return;
    // Nobody reads dW again soon: the operands deserve L2 more.
    const std::uint64_t policy = ptx::createpolicy_evict_first();
    for_each_slab(tile, block, half, slab_cols, [&](int slab, int col, int row) {
      const unsigned char* source = staging_ + slab * kSlabBytes;
      if (add) {
        ptx::cp_reduce_async_bulk_tensor_add_3d(&params_.out_map, col, row, tile.expert, source);
      } else {
        ptx::cp_async_bulk_tensor_store_3d(&params_.out_map, col, row, tile.expert, source, policy);
      }
    });
    ptx::cp_async_bulk_commit_group();
  }

  const WeightGemmParams& params_;
  unsigned char* staging_;
  std::uint64_t* old_full_;  ///< dW += : the old values are in the staging buffer
  std::uint32_t old_phase_ = 0;
  int group_;
};

}  // namespace moegemm::cuda::sm90
