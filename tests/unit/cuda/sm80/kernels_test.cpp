#include "cuda/sm80/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cuda/sm80/heuristic.h"
#include "cuda/sm80/stream_gemm/traits.h"

namespace moegemm::cuda::sm80 {
namespace {

DeviceFacts gpu(int major, std::int64_t block_bytes, std::int64_t multiprocessor_bytes) {
  DeviceFacts facts;
  facts.major = major;
  facts.multiprocessors = 100;
  facts.shared_memory_bytes = block_bytes;
  facts.multiprocessor_shared_memory_bytes = multiprocessor_bytes;
  facts.l2_bytes = 6 << 20;
  return facts;
}

const DeviceFacts kConsumer = gpu(8, 99 << 10, 100 << 10);  // sm_86, 89
const DeviceFacts kAmpere = gpu(8, 163 << 10, 164 << 10);   // sm_80

Problem layer(Op op, DType dtype, std::int64_t experts, std::int64_t rows) {
  Problem problem;
  problem.op = op;
  problem.dtype = problem.out_dtype = dtype;
  problem.experts = experts;
  problem.rows = rows;
  problem.n = 1536;
  problem.k = 2048;
  return problem;
}

const std::vector<KernelEntry> kKernels = kernels();

const KernelEntry* choose(const Problem& problem, const DeviceFacts& facts) {
  const int chosen = cuda::choose(kGeneration, kKernels, problem, facts);
  return chosen < 0 ? nullptr : &kKernels[chosen];
}

constexpr Op kOps[] = {Op::kForward, Op::kDx, Op::kDw};
constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

TEST(Sm80Kernels, EveryProblemRunsOnEveryGpuFromSm80Up) {
  for (const Op op : kOps) {
    for (const DType dtype : kDtypes) {
      for (const bool tf32 : {false, true}) {
        for (const int alignment : {16, 2}) {
          for (const std::int64_t k : {2048, 45, 1}) {
            Problem problem = layer(op, dtype, 1024, 4096);
            problem.allow_tf32 = tf32;
            problem.input_alignment = alignment;
            problem.k = k;
            EXPECT_NE(choose(problem, kConsumer), nullptr) << to_string(problem);
          }
        }
      }
    }
  }
}

TEST(Sm80Kernels, NamesAreUnique) {
  std::set<std::string> names;
  for (const KernelEntry& kernel : kKernels) {
    EXPECT_TRUE(names.insert(kernel.info.name).second) << kernel.info.name;
  }
}

TEST(Sm80Kernels, AlignedProblemsGetVectorLoads) {
  for (const Op op : kOps) {
    for (const DType dtype : kDtypes) {
      for (const std::int64_t rows : {128, 8192, 65536}) {
        const KernelEntry* kernel = choose(layer(op, dtype, 128, rows), kConsumer);
        ASSERT_NE(kernel, nullptr);
        EXPECT_FALSE(kernel->any_alignment) << kernel->info.name;
      }
    }
  }
}

TEST(Sm80Kernels, UnalignedProblemsGetElementLoads) {
  for (const Op op : kOps) {
    Problem odd = layer(op, DType::kBFloat16, 128, 8192);
    odd.n = 1535;
    EXPECT_TRUE(choose(odd, kConsumer)->any_alignment);
    Problem offset = layer(op, DType::kBFloat16, 128, 8192);
    offset.output_alignment = 8;
    EXPECT_TRUE(choose(offset, kConsumer)->any_alignment);
  }
}

TEST(Sm80Kernels, DecodeGetsTheWeightStreamingTile) {
  const Problem decode = layer(Op::kForward, DType::kBFloat16, 128, 512);
  EXPECT_EQ(choose(decode, kConsumer)->info.tile.rows, 32);
  const Problem prefill = layer(Op::kForward, DType::kBFloat16, 128, 65536);
  EXPECT_EQ(choose(prefill, kConsumer)->info.tile.rows, 128);
}

Problem quantised(Op op, WeightFormat format, std::int64_t rows) {
  Problem problem = layer(op, DType::kBFloat16, 128, rows);
  const ScaleType scales = format == WeightFormat::kMxfp4  ? ScaleType::kE8m0
                           : format == WeightFormat::kInt4 ? ScaleType::kBFloat16
                                                           : ScaleType::kFloat32;
  const int block = format == WeightFormat::kMxfp4 ? 32 : format == WeightFormat::kFp8 ? 128 : 64;
  problem.quantization = {format, scales, format == WeightFormat::kFp8 ? 128 : 1, block};
  return problem;
}

TEST(Sm80Kernels, EveryFormatIsDecodedOnEveryGpuFromSm80Up) {
  for (const WeightFormatInfo& format : kWeightFormats) {
    for (const Op op : {Op::kForward, Op::kDx}) {
      for (const std::int64_t rows : {16, 512, 65536}) {
        for (const DeviceFacts& facts : {kConsumer, kAmpere, gpu(9, 227 << 10, 228 << 10)}) {
          const KernelEntry* kernel = choose(quantised(op, format.value, rows), facts);
          ASSERT_NE(kernel, nullptr) << format.name;
          EXPECT_EQ(kernel->info.weights, format.value) << kernel->info.name;
          if (rows > 512) {
            EXPECT_EQ(kernel->info.tile.rows, 128) << kernel->info.name;
          } else if (op == Op::kForward && facts.shared_memory_bytes >= 160 << 10) {
            EXPECT_TRUE(streams_weights(kernel->info)) << kernel->info.name;
          } else {
            EXPECT_EQ(kernel->info.tile.rows, 16) << kernel->info.name;
          }
        }
      }
    }
  }
}

TEST(Sm80Kernels, PackedRowsThatAreNotAlignedAreNotDecoded) {
  Problem problem = quantised(Op::kForward, WeightFormat::kMxfp4, 512);
  problem.packed_alignment = 8;
  EXPECT_EQ(choose(problem, kAmpere), nullptr);
}

TEST(Sm80Kernels, BlocksOfNf4ThatCrossRowsAreNotDecoded) {
  Problem problem = quantised(Op::kDx, WeightFormat::kNf4, 512);
  problem.k = 2080;
  EXPECT_EQ(choose(problem, kAmpere), nullptr);
  problem.quantization.block_k = 32;
  EXPECT_NE(choose(problem, kAmpere), nullptr);
}

TEST(Sm80Kernels, LongerStagesAreForGpusThatHoldTwoBlocksOfThem) {
  const DeviceFacts newer = gpu(10, 227 << 10, 228 << 10);
  for (const Op op : kOps) {
    const Problem problem = layer(op, DType::kBFloat16, 128, 65536);
    EXPECT_EQ(choose(problem, kAmpere)->info.tile.depth, 32);
    EXPECT_EQ(choose(problem, newer)->info.tile.depth, 64);
    EXPECT_EQ(resident_blocks(*choose(problem, kAmpere), problem, kAmpere), 2);
    EXPECT_EQ(resident_blocks(*choose(problem, newer), problem, newer), 2);
  }
}

TEST(Sm80Kernels, WarpsThatOnlyCopyAreForHopper) {
  const DeviceFacts hopper = gpu(9, 227 << 10, 228 << 10);
  for (const Op op : kOps) {
    const Problem problem = layer(op, DType::kBFloat16, 128, 65536);
    EXPECT_TRUE(choose(problem, hopper)->copies_apart);
    EXPECT_EQ(resident_blocks(*choose(problem, hopper), problem, hopper), 1);
    for (const int major : {8, 10}) {
      EXPECT_EQ(refuse(*choose(problem, hopper), problem, gpu(major, 227 << 10, 228 << 10)),
                "is compiled for compute capability 9.0 only");
    }
  }
}

TEST(Sm80Kernels, Tf32IsAllOrNothing) {
  for (const Op op : kOps) {
    Problem problem = layer(op, DType::kFloat32, 128, 8192);
    EXPECT_NE(choose(problem, kConsumer)->info.name.find("_fp32_"), std::string::npos);
    problem.allow_tf32 = true;
    EXPECT_NE(choose(problem, kConsumer)->info.name.find("_tf32_"), std::string::npos);
  }
}

TEST(Sm80Kernels, TheGridHoldsWhatRunsAtTheSameTime) {
  const Problem problem = layer(Op::kForward, DType::kBFloat16, 128, 65536);
  const KernelEntry* kernel = choose(problem, kAmpere);
  EXPECT_EQ(kernel->grid(*kernel, problem, kConsumer).grid, 100);
  EXPECT_EQ(kernel->grid(*kernel, problem, kAmpere).grid, 100 * kernel->blocks_per_multiprocessor);
  Problem small = layer(Op::kForward, DType::kBFloat16, 1, 1);
  small.n = 8;
  EXPECT_EQ(kernel->grid(*kernel, small, kAmpere).grid, 1);
}

TEST(Sm80Kernels, TooManyExpertsAreRefusedWithTheirNumber) {
  for (const std::int64_t experts : {1 << 20, 1 << 29}) {  // 8 bytes each: the second wraps 32 bits
    const Problem problem = layer(Op::kForward, DType::kBFloat16, experts, 8);
    for (const KernelEntry& kernel : kKernels) {
      if (kernel.info.op != Op::kForward || kernel.layer_functions.empty()) continue;
      EXPECT_NE(refuse(kernel, problem, kConsumer).find(std::to_string(experts) + " experts need"),
                std::string::npos);
    }
  }
}

TEST(Sm80Kernels, TakesTheExpertsThatHopperKernelsDoNotHold) {
  for (const Op op : kOps) {
    EXPECT_NE(choose(layer(op, DType::kBFloat16, 2500, 8192), gpu(9, 227 << 10, 228 << 10)),
              nullptr);
    EXPECT_NE(choose(layer(op, DType::kBFloat16, 20000, 8192), gpu(9, 227 << 10, 228 << 10)),
              nullptr);
  }
}

TEST(Sm80Kernels, RowsFarApartAreFoundInUnitsOf32Bits) {
  constexpr std::int64_t kGibi = std::int64_t{1} << 30;
  for (const std::int64_t stride : {std::int64_t{1000}, 2 * kGibi - 1, 2 * kGibi, 2 * kGibi + 1,
                                    4 * kGibi - 1, 5 * kGibi + 8, 32 * kGibi - 8}) {
    const RowPitch pitch = row_pitch(stride, DType::kBFloat16);
    EXPECT_EQ(std::int64_t{pitch.unit_bytes} * pitch.units, 2 * stride);
    EXPECT_EQ(pitch.units == 1, stride < 2 * kGibi);
  }
}

TEST(Sm80Kernels, RowsTooFarApartAreRefusedByThePlan) {
  for (const Op op : kOps) {
    for (const DType dtype : kDtypes) {
      Problem problem = layer(op, dtype, 8, 8192);
      problem.far_apart = true;
      EXPECT_EQ(choose(problem, kAmpere), nullptr) << to_string(problem);
    }
  }
  Problem problem = quantised(Op::kForward, WeightFormat::kMxfp4, 16);
  problem.far_apart = true;
  EXPECT_EQ(choose(problem, kAmpere), nullptr) << to_string(problem);
}

TEST(Sm80Kernels, ACapacityOfManyRowsStreamsWeights) {
  Problem problem = quantised(Op::kForward, WeightFormat::kMxfp4, 128 * 1024);
  problem.n = 4096;
  problem.segments = Segments::kPlaced;
  problem.expected_rows = problem.experts;
  const KernelEntry* kernel = choose(problem, gpu(9, 227 << 10, 228 << 10));
  ASSERT_NE(kernel, nullptr);
  EXPECT_TRUE(streams_weights(kernel->info)) << kernel->info.name;
}

TEST(Sm80Kernels, TilesOfSegmentsThatOverlapAreCounted) {
  Problem problem = layer(Op::kForward, DType::kBFloat16, 1024, 16384);
  problem.n = 1 << 22;
  for (const KernelEntry& kernel : kKernels) {
    if (kernel.info.op != Op::kForward || kernel.info.tile.rows > 32) continue;
    problem.quantization.format = kernel.info.weights;
    problem.segments = Segments::kPlaced;
    EXPECT_EQ(refuse_size(kernel, problem, gpu(9, 227 << 10, 228 << 10)),
              "more than 2^30 output tiles")
        << kernel.info.name;
    problem.segments = Segments::kPacked;
    EXPECT_EQ(refuse_size(kernel, problem, gpu(9, 227 << 10, 228 << 10)), "") << kernel.info.name;
  }
}

TEST(Sm80Kernels, OrderOfTilesIsPlanned) {
  const auto order = [](const Problem& problem) {
    const KernelEntry* kernel = choose(problem, kAmpere);
    return kernel->grid(*kernel, problem, kAmpere).order;
  };
  // 6 MiB of L2: 256 rows of 2048 elements are 1 MiB, 1024 rows 4 MiB.
  EXPECT_EQ(order(layer(Op::kForward, DType::kBFloat16, 8, 8 * 256)), TileOrder::kByExpert);
  EXPECT_EQ(order(layer(Op::kForward, DType::kBFloat16, 8, 8 * 1024)), TileOrder::kFullTilesFirst);
  EXPECT_EQ(order(layer(Op::kDw, DType::kBFloat16, 8, 8 * 256)), TileOrder::kAlongColumns);
  EXPECT_EQ(order(layer(Op::kDw, DType::kBFloat16, 8, 8 * 1024)), TileOrder::kAlongRows);
}

TEST(Sm80Kernels, StreamingTilesHaveAtMostTheRowsThatABlockHasRoomFor) {
  int tiles = 0, cut_tiles = 0;
  for (const DeviceFacts& facts :
       {kConsumer, kAmpere, gpu(9, 227 << 10, 228 << 10), gpu(12, 99 << 10, 100 << 10)}) {
    for (const WeightFormatInfo& format : kWeightFormats) {
      for (const std::int64_t experts : {1, 128, 1024}) {
        for (const std::int64_t k : {512, 2048, 2880, 7168, 14336}) {
          Problem problem = quantised(Op::kForward, format.value, 16);
          problem.experts = experts;
          problem.k = k;
          for (const KernelEntry& kernel : kKernels) {
            if (!streams_weights(kernel.info) || !refuse(kernel, problem, facts).empty()) continue;
            const LaunchPolicy policy = kernel.grid(kernel, problem, facts);
            const std::int64_t pitch = stream_row_pitch(k);
            const std::int64_t fixed = kernel.smem_bytes(problem) - kLeastStreamRows * pitch;
            const std::int64_t room = (facts.shared_memory_bytes - fixed) / pitch;
            const int slots = static_cast<int>(std::min<std::int64_t>(room, kMostStreamRows));
            const int granule = std::min(slots, 8);
            const int rows = std::min(kernel.info.tile.rows, slots / granule * granule);
            EXPECT_EQ(policy.smem_bytes, fixed + slots * pitch) << to_string(problem);
            EXPECT_EQ(policy.tile_rows, rows) << to_string(problem);
            tiles += 1;
            cut_tiles += rows < kernel.info.tile.rows ? 1 : 0;
          }
        }
      }
    }
  }
  EXPECT_GT(tiles, 50);
  EXPECT_GT(cut_tiles, 10);
}

TEST(Sm80ComputeCapability, TheOldestArchitectureAndEverythingNewerRuns) {
  EXPECT_TRUE(runs_on("80,90", 8, 0));
  EXPECT_TRUE(runs_on("80,90", 8, 9));
  EXPECT_TRUE(runs_on("80,90", 9, 0));
  EXPECT_TRUE(runs_on("80,90", 12, 0));
  EXPECT_TRUE(runs_on("80,86,89,90a,100,120", 12, 1));
  EXPECT_TRUE(runs_on("90a", 10, 0));
  EXPECT_FALSE(runs_on("80,90", 7, 5));
  EXPECT_FALSE(runs_on("90", 8, 6));
  EXPECT_FALSE(runs_on("86,90", 8, 0));
  EXPECT_FALSE(runs_on("", 9, 0));
}

TEST(Sm80ComputeCapability, TensorCoresAreFasterThanFmaAndTf32IsHalfOf16Bit) {
  const Problem half = layer(Op::kForward, DType::kBFloat16, 8, 8192);
  Problem single = layer(Op::kForward, DType::kFloat32, 8, 8192);
  EXPECT_EQ(flops_per_clock(half, 8, 0), 2048);
  EXPECT_EQ(flops_per_clock(single, 8, 0), 128);
  EXPECT_EQ(flops_per_clock(single, 8, 9), 256);
  single.allow_tf32 = true;
  EXPECT_EQ(flops_per_clock(single, 8, 0), 1024);
}

TEST(Sm80ComputeCapability, ThisLibraryNamesItsArchitectures) {
  EXPECT_FALSE(compiled_archs().empty());
}

}  // namespace
}  // namespace moegemm::cuda::sm80
