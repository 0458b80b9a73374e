#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "moegemm/export.h"
#include "moegemm/kinds.h"

namespace moegemm {

/// Who runs a problem. `kReference` is the plain oracle, `kCpu` the fast CPU kernels, `kSm90` the
/// Hopper kernels, `kSm80` the kernels for every NVIDIA GPU from Ampere up.
enum class BackendKind : std::uint8_t { kReference, kCpu, kSm90, kSm80 };
/// Best first.
inline constexpr Named<BackendKind> kBackends[] = {
    {BackendKind::kSm90, "sm90"},
    {BackendKind::kSm80, "sm80"},
    {BackendKind::kCpu, "cpu"},
    {BackendKind::kReference, "reference"},
};

MOEGEMM_API const char* to_string(BackendKind kind);
/// The inverse of to_string; empty for any other word.
MOEGEMM_API std::optional<BackendKind> parse_backend(const std::string& name);

/// A kernel asked for by hand. Kernels are compiled ahead of time: the exact one runs if it exists,
/// else the nearest feasible one (`Plan::source` and `Plan::note` say so). Zero means "any".
/// The extents are those of TileShape; in terms of the problem's M, N and K that is
///   forward: rows along M, cols along N, depth along K
///   dX:      rows along M, cols along K, depth along N
///   dW:      rows along N, cols along K, depth along M
struct KernelConfig {
  int block_rows = 0;                    ///< tile extent along the rows of the output
  int block_cols = 0;                    ///< tile extent along the columns of the output
  int block_depth = 0;                   ///< contraction step
  int stages = 0;                        ///< pipeline depth
  std::optional<bool> tma_load_rows;     ///< X (forward, dW) or dY (dX) through TMA
  std::optional<bool> tma_load_weights;  ///< W (forward, dX) or dY (dW) through TMA
  std::optional<bool> tma_store;         ///< output through TMA
  std::string kernel;  ///< exact kernel name as `moegemm info --kernels` lists it; empty: any

  bool operator==(const KernelConfig&) const = default;
};

MOEGEMM_API std::string to_string(const KernelConfig& config);

}  // namespace moegemm
