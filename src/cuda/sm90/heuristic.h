#pragma once

#include "moegemm/info.h"
#include "moegemm/problem.h"

namespace moegemm::cuda::sm90 {

/// The rank of a feasible kernel for a problem: less is better, equal ranks go by list order. Host
/// facts only.
int preference_rank(const KernelInfo& kernel, const Problem& problem);

}  // namespace moegemm::cuda::sm90
