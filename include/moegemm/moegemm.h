#pragma once

/// Everything: matrix products of Mixture-of-Experts layers, forward and backward, with the token
/// permutation inside. Start at ops.h and routing.h.

#include "moegemm/activation.h"
#include "moegemm/compact.h"
#include "moegemm/config.h"
#include "moegemm/epilogue.h"
#include "moegemm/error.h"
#include "moegemm/executor.h"
#include "moegemm/explain.h"
#include "moegemm/info.h"
#include "moegemm/loading.h"
#include "moegemm/memory.h"
#include "moegemm/ops.h"
#include "moegemm/plan.h"
#include "moegemm/planning_gpus.h"
#include "moegemm/problem.h"
#include "moegemm/routing.h"
#include "moegemm/tensor.h"
#include "moegemm/tune.h"
#include "moegemm/warning.h"
