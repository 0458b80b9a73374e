#pragma once

#include "cuda/device/weight_decoders.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/partial_copy.cuh"
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

/// `Tile` has feature and expert; `thread` is the thread's number among those that copy.
template <typename Traits>
class QuantisedWeights {
  using Shape = typename Traits::Shape;
  using Element = typename Traits::Element;
  static constexpr bool kForward = Traits::kBMajor == Major::kDepth;

 public:
  /// Starts to copy the block at `depth` into the stage whose weights begin at `target`.
  template <typename Tile>
  static __device__ __forceinline__ DecodeTicket copy(const RowGemmParams& params,
                                                      std::uint32_t target, const Tile& tile,
                                                      int depth, int thread) {
    return params.scales.format == WeightFormat::kFp8
               ? copy_pieces<8>(params, target, tile, depth, thread)
               : copy_pieces<4>(params, target, tile, depth, thread);
  }

  /// Decodes this thread's pieces, which have arrived.
  static __device__ __forceinline__ void decode(const RowGemmParams& params, std::uint32_t target,
                                                DecodeTicket ticket, int thread) {
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
        return decode_pieces<8>(target, ticket, thread, [&](std::uint32_t bits) {
          return Fp8Decoder<Element>(scale_value(type, bits));
        });
    }
  }

 private:
  template <int Bits, typename Tile>
  static __device__ __forceinline__ DecodeTicket copy_pieces(const RowGemmParams& params,
                                                             std::uint32_t target, const Tile& tile,
                                                             int depth, int thread) {
    using P = Pieces<Traits, Bits>;
    const WeightScales& scales = params.scales;
    // The thread's first piece is W_e[n, k] and what follows.
    const int row = P::row(thread), column = P::piece(thread) * P::kWeights;
    const int n = kForward ? tile.feature + placed_column(row) : depth + row;
    const int k = kForward ? depth + column : tile.feature + column;
    const int rows_left = (kForward ? params.out.cols : params.depth) - n;
    const int rows = k < (kForward ? params.depth : params.out.cols) ? rows_left : 0;
    const std::byte* source =
        params.weights + tile.expert * params.expert_bytes + n * params.weight_bytes + k * Bits / 8;
    const std::byte* expert_scales =
        scales.data +
        ((tile.expert * scales.expert + (k >> scales.column_shift)) << scales.size_shift);
    target += P::first(thread);
    DecodeTicket ticket = {DecodeTicket::kDecode};
#pragma unroll
    for (int i = 0; i < P::kPasses; ++i) {
      const bool exists = i * P::kRowsAtOnce < rows;
      ptx::cp_async_16_or_zero(target + P::pass(i), source, exists);
      source += P::kRowsAtOnce * params.weight_bytes;
      const std::int64_t scale_row = (n + i * P::kRowsAtOnce) >> scales.row_shift;
      const std::byte* scale = expert_scales + (scale_row * scales.columns << scales.size_shift);
      const auto inside = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(scale)) & 3;
      const std::byte* word = scale - inside;
      const auto left = scales.data + scales.bytes - word;
      ptx::cp_async_4_partial((target ^ P::chunk(1)) + P::pass(i) + P::scale_word(thread), word,
                              exists ? static_cast<int>(left < 4 ? left : 4) : 0);
      ticket.bits |= inside << 2 * i;
    }
    return ticket;
  }

  template <int Bits, typename Make>
  static __device__ __forceinline__ void decode_pieces(std::uint32_t target, DecodeTicket ticket,
                                                       int thread, const Make& make) {
    using P = Pieces<Traits, Bits>;
    target += P::first(thread);
    const std::uint32_t scale = (target ^ P::chunk(1)) + P::scale_word(thread);
#pragma unroll
    for (int i = 0; i < P::kPasses; ++i) {
      const uint4 packed = ptx::ld_shared_16(target + P::pass(i));
      const std::uint32_t word = ptx::ld_shared_4(scale + P::pass(i));
      decode_piece<P>(packed, make(word >> 8 * (ticket.bits >> 2 * i & 3)), target + P::pass(i));
    }
  }

  template <typename P, typename Decoder>
  static __device__ __forceinline__ void decode_piece(const uint4& packed, const Decoder& decoder,
                                                      std::uint32_t target) {
    const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    if constexpr (requires { decoder.is_usual(); }) {
      const auto each = [&](auto decode) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          std::uint32_t pairs[4];
          decode(words[j], pairs);
          ptx::st_shared_16(target ^ P::chunk(j), {pairs[0], pairs[1], pairs[2], pairs[3]});
        }
      };
      if (decoder.is_usual()) {
        each([&](std::uint32_t w, std::uint32_t(&p)[4]) { decoder.template decode<true>(w, p); });
      } else {
        each([&](std::uint32_t w, std::uint32_t(&p)[4]) { decoder.template decode<false>(w, p); });
      }
    } else if constexpr (Decoder::kWordWeights == 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t pairs[4];
        decoder.decode(words[j], pairs);
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
};

}  // namespace moegemm::cuda::sm80
