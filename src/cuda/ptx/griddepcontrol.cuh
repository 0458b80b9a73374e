#pragma once

/// A launch that begins before the one ahead of it on its stream has ended (programmatic dependent
/// launch). No-ops in a kernel that was launched otherwise, and before compute capability 9.0.
namespace moegemm::cuda::ptx {

/// Whether the code that a GPU of compute capability `major` runs of a translation unit has these
/// instructions: one that is compiled for older GPUs only runs on newer ones without them.
template <int... Archs>
constexpr bool has_griddepcontrol(int major) {
  return ((Archs >= 900 && Archs / 100 <= major) || ...);
}

/// Until the launch ahead is complete and what it wrote is visible to this whole grid. Every block
/// of a kernel that may be launched early calls it before it ends: else the grid could be complete
/// before the one ahead is, and what comes after would not wait for that.
/// What it wrote is read by plain loads. A compiler may move __ldg before this, since that promises
/// that nobody writes while the kernel runs; it stays where an address is known after this only.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next launch begin, if it may begin early, once a thread of every block has called this
/// or every thread of the block has ended. Called after griddepcontrol_wait: whoever begins then
/// finds complete whatever was complete when this grid's wait ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace moegemm::cuda::ptx
