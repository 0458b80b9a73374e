#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "moegemm/epilogue.h"
#include "moegemm/kinds.h"
#include "moegemm/quantization.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Which side of the product is in flat (token-major) order instead of expert order.
enum class Permutation : std::uint8_t { kNone, kX, kY };

/// How each expert's W is stored, and with it dW. Neither is ever copied into the other.
enum class WeightLayout : std::uint8_t {
  kNk,  ///< [E, N, K]: a row for each column of Y
  kKn,  ///< [E, K, N]: a row for each column of X
};

/// How the segments of the experts are told.
enum class Segments : std::uint8_t {
  kPacked,  ///< sizes: they follow one another from row 0
  kPlaced,  ///< sizes and starts: anywhere, with gaps
  kEnds,    ///< cumulative ends: segment e begins where e - 1 ends
};

/// What a call does to rows outside every segment.
enum class Tails : std::uint8_t {
  kZero,       ///< they become zero
  kUndefined,  ///< they are neither read nor written
};

/// What a call asks for, as pure data: no pointers, nothing that a device would have to be asked
/// for. Equal problems get equal plans.
struct Problem {
  Op op = Op::kForward;
  DType dtype = DType::kBFloat16;      ///< of X, W and dY
  DType out_dtype = DType::kBFloat16;  ///< of Y, dX or dW
  std::int64_t experts = 0;            ///< E
  std::int64_t n = 0;                  ///< N: columns of Y and dY
  std::int64_t k = 0;                  ///< K: columns of X and dX
  std::int64_t rows = 0;               ///< in expert order: M = T * topk, or a capacity
  std::int64_t topk = 1;
  /// M = T * topk, the flat rows that an index may name, where `rows` is not M; -1 where it is.
  std::int64_t slots = -1;
  WeightLayout weight_layout = WeightLayout::kNk;
  Quantization quantization = {};  ///< of W; dtype is then what its values are decoded to
  Permutation permutation = Permutation::kNone;
  Segments segments = Segments::kPacked;
  Tails tails = Tails::kZero;
  std::int64_t expected_rows = -1;  ///< inside segments, about: what to plan for; -1: all rows
  int max_multiprocessors = 0;      ///< of a GPU, that kernels may take; 0: all
  bool multiply = false;            ///< scale row r by router_weights[gather_indices[r]]
  bool accumulate = false;          ///< dW += instead of dW =
  bool dy_per_token = false;        ///< permute_y of dX and dW: dY has one row per token, [T, N]
  bool presorted = false;  ///< dW: the permuted operand was copied into expert order; the indices
                           ///< only say which rows are absent
  bool far_rows = false;   ///< the gathered operand spans more than 64 GiB
  bool far_apart = false;  ///< two rows of X or dY are further apart than 32 bits count in units of
                           ///< 1, 2, 4, 8 or 16 bytes: beyond 64 GiB, or beyond 4 and unaligned
  bool rows_pending = false;  ///< forward and dX: LaunchAhead::kWritesRows
  bool allow_tf32 = false;
  bool batch_invariant = true;  ///< only kernels that sum in the order of their backend
  bool ups_apart = false;       ///< forward: W has the first half of N, another tensor the second
  bool ups_follow = false;      ///< and that one lies after it, near enough for one map of both
  std::int64_t low_rank =
      0;              ///< forward and dX: depth of the part that is added to the sums; 0: none
  bool bias = false;  ///< forward and dX: adds its expert's bias to each row, before it is scaled
  std::optional<Activation> activation;   ///< forward and dX: what follows the product and its bias
  DType sizes_dtype = DType::kInt32;      ///< of m_sizes
  DType index_dtype = DType::kInt32;      ///< of gather_indices
  DType weights_dtype = DType::kFloat32;  ///< of router_weights
  /// Largest power of two, at most 16, that divides the base address and the row pitch in bytes of
  /// every operand of that role.
  int input_alignment = 16;   ///< the two inputs; X or dY alone where W is quantised
  int output_alignment = 16;  ///< the output
  int dy_alignment = 16;      ///< dW: of dY alone (of X if dW is [E, K, N]), whose partner a pass
                              ///< may replace by a copy
  int packed_alignment = 16;  ///< the values of a quantised W, by its rows of packed bytes
  int scales_alignment = 16;  ///< its scales, by their rows
  Device device;

  /// Flat rows: indices are in [0, flat_rows()).
  std::int64_t flat_rows() const { return slots < 0 ? rows : slots; }
  /// Rows that a plan should be made for.
  std::int64_t planned_rows() const {
    return expected_rows < 0 || expected_rows > rows ? rows : expected_rows;
  }
  std::int64_t tokens() const { return topk > 0 ? flat_rows() / topk : 0; }
  /// Rows read per row of the segment come from flat order.
  bool gathers_x() const { return permutation == Permutation::kX && op != Op::kDx && !presorted; }
  bool gathers_dy() const {
    return permutation == Permutation::kY && op != Op::kForward && !presorted;
  }
  bool gathers() const { return gathers_x() || gathers_dy(); }
  /// Result rows are stored in flat order.
  bool scatters() const {
    return (op == Op::kForward && permutation == Permutation::kY) ||
           (op == Op::kDx && permutation == Permutation::kX);
  }
  /// Rows of Y or dX.
  std::int64_t output_rows() const { return scatters() ? flat_rows() : rows; }
  /// What a gathered flat index is divided by to give the row to read: X holds one row per token,
  /// dY one per token and slot unless dy_per_token.
  std::int64_t gather_divisor() const { return gathers_x() || dy_per_token ? topk : 1; }
  /// Rows of W_e^T that make the output's columns: N of forward, K of dX.
  std::int64_t features() const { return op == Op::kForward ? n : k; }
  /// Columns of Y or dX: the features, or what the activation leaves of them.
  std::int64_t output_columns() const {
    return activation ? activation->activated_columns(features()) : features();
  }
  double flops() const {
    const double low = static_cast<double>(features()) * static_cast<double>(low_rank);
    return 2.0 * static_cast<double>(planned_rows()) *
           (static_cast<double>(n) * static_cast<double>(k) + low);
  }
  bool operator==(const Problem&) const = default;
};

MOEGEMM_API const char* to_string(Op op);                    ///< "forward", "dX", "dW"
MOEGEMM_API const char* to_string(Permutation permutation);  ///< "none", "permute_x", "permute_y"
MOEGEMM_API const char* to_string(WeightLayout layout);      ///< "[E, N, K]", "[E, K, N]"
MOEGEMM_API std::string to_string(const Problem& problem);
MOEGEMM_API std::size_t hash_value(const Problem& problem);

}  // namespace moegemm

template <>
struct std::hash<moegemm::Problem> {
  std::size_t operator()(const moegemm::Problem& problem) const {
    return moegemm::hash_value(problem);
  }
};
