#pragma once

namespace moegemm::cuda {

/// Each compares the GPU with the CPU over random cases, prints what it did and returns how many
/// cases failed.
int check_route(int cases, unsigned long long seed);
int check_combine(int cases, unsigned long long seed);
int check_scale_rows(int cases, unsigned long long seed);
int check_faults(int cases, unsigned long long seed);
/// Persistent kernels on several streams, in graphs and from several threads, all on tile counters.
int check_tile_counters();

/// Prints microseconds and bandwidth.
void time_rows();
void time_activation();
void time_host_layer();

}  // namespace moegemm::cuda
