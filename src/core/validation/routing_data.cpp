#include "core/validation/routing_data.h"

#include "core/refusal.h"
#include "core/registry.h"

namespace moegemm {
namespace {

[[noreturn]] void raise(const RoutingFault& fault, const Problem& problem) {
  switch (fault.what) {
    case RoutingFault::What::kNegativeSize:
      refuse_value("m_sizes[", fault.position, "] is ", fault.value,
                   "; sizes must not be negative");
    case RoutingFault::What::kSizesExceedRows:
      refuse_value("m_sizes[0] to m_sizes[", fault.position, "] add up to ", fault.value,
                   "; there are only M = ", problem.rows, " rows");
    case RoutingFault::What::kSegmentOutside:
      refuse_value("the rows of expert ", fault.position, " are ", fault.value, " to ",
                   fault.earlier, "; they must be in [0, M) with M = ", problem.rows);
    case RoutingFault::What::kSegmentsOverlap:
      refuse_value("the rows of expert ", fault.position, " begin at ", fault.value,
                   ", inside those of expert ", fault.earlier, "; segments must not overlap");
    case RoutingFault::What::kIndexOutOfRange:
      refuse_value("gather_indices[", fault.position, "] is ", fault.value,
                   "; indices must be in [0, M) with M = ", problem.flat_rows());
    case RoutingFault::What::kDuplicateIndex:
      refuse_value("gather_indices[", fault.position, "] is ", fault.value, ", as gather_indices[",
                   fault.earlier, "] is; an index may stand at one position only");
  }
  refuse_value("the routing data is invalid");
}

}  // namespace

void check_routing(const Problem& problem, RoutingView routing, const ExecutionContext& context) {
  if (problem.permutation == Permutation::kNone) routing.gather_indices = {};
  const Passes* passes = passes_on(problem.device.type);
  if (passes == nullptr) return;  // nor does anything plan for that device, which says so
  if (const auto fault = passes->check(routing, problem.rows, problem.flat_rows(), context)) {
    raise(*fault, problem);
  }
}

}  // namespace moegemm
