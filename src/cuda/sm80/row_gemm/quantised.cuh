#pragma once

#include "cuda/device/weights/weight_decoders.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/packed_memory.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/row_gemm/params.h"
#include "cuda/sm80/row_gemm/pieces.h"

/// Quantised weights: copied packed, decoded in the stage by the thread that copied them.
namespace moegemm::cuda::sm80 {

/// What a thread must know of a block that it has copied to decode it: where in their words the
/// scales of its pieces begin, two bits each; 0 in kDecode: nothing is packed there.
struct DecodeTicket {
  static constexpr std::uint32_t kDecode = 1u << 31;
  std::uint32_t bits = 0;
};

/// In place of the below, where nothing is packed.
struct PlainWeights {
  __device__ __forceinline__ PlainWeights(const RowGemmParams&, int) {}
  template <typename Tile>
  static __device__ __forceinline__ void start(const RowGemmParams&, const Tile&, int) {}
};

/// One thread's share; `thread` is its number among those that copy.
template <typename Traits>
class QuantisedWeights {
  using Shape = typename Traits::Shape;
  using Element = typename Traits::Element;
  static constexpr bool kForward = Traits::kBMajor == Major::kDepth;
  template <int Bits>
  using P = Pieces<Traits, Bits>;

 public:
  __device__ __forceinline__ QuantisedWeights(const RowGemmParams& params, int thread)
      : first_(ptx::keep(eight_bits(params) ? P<8>::first(thread) : P<4>::first(thread))) {}

  /// The tile whose blocks come next.
  template <typename Tile>
  __device__ __forceinline__ void start(const RowGemmParams& params, const Tile& tile, int thread) {
    const int n =
        kForward ? tile.feature + placed_column(row(params, thread)) : row(params, thread);
    const int k = column(params, thread) + (kForward ? 0 : tile.feature);
    const WeightScales& scales = params.scales;
    source_ = params.weights + tile.expert * params.expert_bytes + n * params.weight_bytes +
              (eight_bits(params) ? k : k / 2);
    scales_ = scales.data + tile.expert * scales.expert_bytes +
              (kForward ? (n >> scales.row_shift) * scales.row_bytes
                        : std::int64_t{k >> scales.column_shift} << scales.size_shift);
  }

  /// Starts to copy the block at `depth` of the tile into the stage whose weights begin at
  /// `target`.
  template <typename Tile>
  __device__ __forceinline__ DecodeTicket copy(const RowGemmParams& params, std::uint32_t target,
                                               const Tile& tile, int depth, int thread) {
    // The last word with scales may reach past their end.
    const int rows_end = kForward ? tile.feature + Shape::kCols : depth + Traits::kDepth;
    const bool at_end = rows_end >= (kForward ? params.out.cols : params.depth) &&
                        tile.expert + 1 == params.experts;
    const bool regular = !at_end && tile.feature + Shape::kCols <= params.out.cols &&
                         depth + Traits::kDepth <= params.depth;
    const auto copy_all = [&]<int Bits>() {
      DecodeTicket ticket;
      if (regular) {
        ticket = copy_pieces<Bits, true>(params, target, tile, depth, thread);
      } else {
        ticket = copy_pieces<Bits, false>(params, target, tile, depth, thread);
      }
      source_ += kForward ? Traits::kDepth * Bits / 8 : Traits::kDepth * params.weight_bytes;
      return ticket;
    };
    return eight_bits(params) ? copy_all.template operator()<8>()
                              : copy_all.template operator()<4>();
  }

  /// Decodes this thread's pieces, which have arrived.
  __device__ __forceinline__ void decode(const RowGemmParams& params, std::uint32_t target,
                                         DecodeTicket ticket, int thread) const {
    if (!(ticket.bits & DecodeTicket::kDecode)) return;
    const ScaleType type = params.scales.type;
    switch (params.scales.format) {
      case WeightFormat::kMxfp4:
        return decode_pieces<4>(target, ticket, thread, [](std::uint32_t bits) {
          return Mxfp4Decoder<Element>(bits & 0xff);
        });
      case WeightFormat::kInt4:
        if (type == ScaleType::kBFloat16) {
          return decode_pieces<4>(target, ticket, thread, [](std::uint32_t bits) {
            return Int4Decoder<Element, __nv_bfloat16>(bits & 0xffff);
          });
        }
        return decode_pieces<4>(target, ticket, thread, [](std::uint32_t bits) {
          return Int4Decoder<Element, __half>(bits & 0xffff);
        });
      case WeightFormat::kNf4:
        return decode_pieces<4>(target, ticket, thread, [](std::uint32_t bits) {
          return Nf4Decoder<Element>(std::bit_cast<float>(bits));
        });
      default:
        if (type == ScaleType::kFloat32) {
          return decode_pieces<8>(target, ticket, thread, [](std::uint32_t bits) {
            return Fp8Decoder<Element>(std::bit_cast<float>(bits));
          });
        }
        return decode_pieces<8>(target, ticket, thread, [&](std::uint32_t bits) {
          return Fp8Decoder<Element>(scale_value(type, bits));
        });
    }
  }

 private:
  static __device__ __forceinline__ bool eight_bits(const RowGemmParams& params) {
    return params.scales.format == WeightFormat::kFp8;
  }
  /// Of W in the stage: where the thread's first piece is.
  static __device__ __forceinline__ int row(const RowGemmParams& params, int thread) {
    return eight_bits(params) ? P<8>::row(thread) : P<4>::row(thread);
  }
  static __device__ __forceinline__ int column(const RowGemmParams& params, int thread) {
    return eight_bits(params) ? P<8>::piece(thread) * P<8>::kWeights
                              : P<4>::piece(thread) * P<4>::kWeights;
  }

  /// `Regular`: all of them exist, and so do whole words with their scales.
  template <int Bits, bool Regular, typename Tile>
  __device__ __forceinline__ DecodeTicket copy_pieces(const RowGemmParams& params,
                                                      std::uint32_t target, const Tile& tile,
                                                      int depth, int thread) const {
    using P = Pieces<Traits, Bits>;
    const WeightScales& scales = params.scales;
    const int own_row = P::row(thread), own_column = P::piece(thread) * P::kWeights;
    const std::byte* scale =
        scales_ +
        (kForward ? std::int64_t{(depth + own_column) >> scales.column_shift} << scales.size_shift
                  : ((depth + own_row) >> scales.row_shift) * scales.row_bytes);
    int rows = P::kRows;  // of W that exist, from the thread's first on
    if constexpr (!Regular) {
      const bool inside = kForward ? depth + own_column < params.depth
                                   : tile.feature + own_column < params.out.cols;
      rows = !inside ? 0
                     : (kForward ? params.out.cols - tile.feature - placed_column(own_row)
                                 : params.depth - depth - own_row);
    }
    target += first_;
    DecodeTicket ticket = {DecodeTicket::kDecode};
#pragma unroll
    for (int i = 0; i < P::kPasses; ++i) {
      constexpr int kStep = P::kRowsAtOnce;
      const std::byte* source = source_ + i * kStep * params.weight_bytes;
      // Passes begin at multiples of the step, which divides the rows that share a scale, or is
      // divided by them.
      const std::byte* own_scale = scale + (i * kStep >> scales.row_shift) * scales.row_bytes;
      const auto inside =
          static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(own_scale)) & 3;
      const std::byte* word = own_scale - inside;
      ticket.bits |= inside << 2 * i;
      const std::uint32_t word_target = (target ^ P::chunk(1)) + P::pass(i) + P::scale_word(thread);
      if constexpr (Regular) {
        ptx::cp_async_16(target + P::pass(i), source);
        ptx::cp_async_4_partial(word_target, word, 4);
      } else {
        const bool exists = i * kStep < rows;
        const std::int64_t left = scales.end - word;
        ptx::cp_async_16_or_zero(target + P::pass(i), source, exists);
        ptx::cp_async_4_partial(word_target, word,
                                exists ? static_cast<int>(left < 4 ? left : 4) : 0);
      }
    }
    return ticket;
  }

  template <int Bits, typename Make>
  __device__ __forceinline__ void decode_pieces(std::uint32_t target, DecodeTicket ticket,
                                                int thread, const Make& make) const {
    using P = Pieces<Traits, Bits>;
    target += first_;
    const std::uint32_t scale = (target ^ P::chunk(1)) + P::scale_word(thread);
    constexpr int kTogether = P::kPasses < 4 ? P::kPasses : 4;
#pragma unroll
    for (int first = 0; first < P::kPasses; first += kTogether) {
      uint4 packed[kTogether];  // all of them on their way before the first is decoded
      std::uint32_t bits[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        packed[i] = ptx::ld_shared_16(target + P::pass(first + i));
        bits[i] = ptx::ld_shared_4(scale + P::pass(first + i));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        bits[i] >>= 8 * (ticket.bits >> 2 * (first + i) & 3);
      }
      if constexpr (requires { make(0u).is_usual(); }) {
        bool usual = true;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) usual = usual && make(bits[i]).is_usual();
        if (!usual) {
          decode_unusual<P>(bits, target + P::pass(first), make);
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        decode_piece<P>(packed[i], make(bits[i]), target + P::pass(first + i));
      }
    }
  }

  /// Rare, and so short code: from where they still are, a word at a time, the last one first, as
  /// the first chunk holds them.
  template <typename P, typename Make, int Together>
  static __device__ __forceinline__ void decode_unusual(const std::uint32_t (&bits)[Together],
                                                        std::uint32_t target, const Make& make) {
    std::uint32_t scales = 0;  // a byte each
#pragma unroll
    for (int i = 0; i < Together; ++i) scales |= (bits[i] & 0xff) << 8 * i;
#pragma unroll 1
    for (int i = 0; i < Together; ++i) {
      const auto decoder = make(scales >> 8 * i);
#pragma unroll 1
      for (int j = 3; j >= 0; --j) {
        std::uint32_t pairs[4];
        decoder.template decode<false>(ptx::ld_shared_4(target + 4 * j), pairs);
        ptx::st_shared_16(target ^ P::chunk(j), {pairs[0], pairs[1], pairs[2], pairs[3]});
      }
      target += P::pass(1);
    }
  }

  template <typename P, typename Decoder>
  static __device__ __forceinline__ void decode_piece(const uint4& packed, const Decoder& decoder,
                                                      std::uint32_t target) {
    const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    if constexpr (Decoder::kWordWeights == 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t pairs[4];
        if constexpr (requires { decoder.is_usual(); }) {
          decoder.template decode<true>(words[j], pairs);
        } else {
          decoder.decode(words[j], pairs);
        }
        ptx::st_shared_16(target ^ P::chunk(j), {pairs[0], pairs[1], pairs[2], pairs[3]});
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t low[2], high[2];
        decoder.decode(words[2 * j], low);
        decoder.decode(words[2 * j + 1], high);
        ptx::st_shared_16(target ^ P::chunk(j), {low[0], low[1], high[0], high[1]});
      }
    }
  }

  const std::uint32_t first_;  ///< Pieces::first
  const std::byte* source_;    ///< the first piece of the next block
  const std::byte* scales_;    ///< forward: of its row of W; dX: of its columns in row 0
};

}  // namespace moegemm::cuda::sm80
