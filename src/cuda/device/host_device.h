#pragma once

/// Functions that both nvcc and the host compiler build: the maths of kernels, tested on the CPU.
#if defined(__CUDACC__)
#define MOEGEMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOEGEMM_HOST_DEVICE inline
#endif
