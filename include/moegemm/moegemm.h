#pragma once

/// Everything: matrix products of Mixture-of-Experts layers, forward and backward, with the token
/// permutation inside. Start at ops.h and passes.h.

#include "moegemm/describe.h"
#include "moegemm/epilogue.h"
#include "moegemm/error.h"
#include "moegemm/execution.h"
#include "moegemm/info.h"
#include "moegemm/kinds.h"
#include "moegemm/ops.h"
#include "moegemm/passes.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"
#include "moegemm/quantization.h"
#include "moegemm/tensor.h"
#include "moegemm/tune.h"
