#pragma once

#include <string>
#include <vector>

#include "moegemm/plan.h"
#include "moegemm/tune.h"

/// How results leave the program for people.
namespace moegemm::cli {

/// Cells padded to their column's width; `right_aligned[c]` for columns of numbers.
std::string format_table(const std::vector<std::string>& header,
                         const std::vector<std::vector<std::string>>& rows,
                         const std::vector<bool>& right_aligned);

/// "6x4x32"; nothing for a kernel without tiles.
std::string tile_text(const TileShape& tile);

/// "cpu avx512_dot 6x4x32": backend, kernel and tile, with the passes before and after it.
std::string plan_summary(const Plan& plan);

/// "12.3 us", "4.56 ms".
std::string duration_text(double us);

/// What became of a measurement: "measured", or why there is none.
std::string status_of(const TuneReport& report);

}  // namespace moegemm::cli
