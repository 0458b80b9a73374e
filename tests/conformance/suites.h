#pragma once

/// Each subject registers its tests, once per backend or device type that this machine runs. Suites
/// are called after the backend, so that `--gtest_filter=sm90*` runs one backend.
namespace moegemm::testing {

void add_product_tests();       ///< the list of cases
void add_random_tests();        ///< cases drawn from the run's seed
void add_invariance_tests();    ///< same bits: again, alone, in any batch, with any kernel
void add_large_offset_tests();  ///< more than 2^31 and 2^32 elements ("slow")
void add_check_tests();         ///< GemmOptions::check
void add_route_tests();
void add_row_tests();       ///< combine and scale_rows
void add_exchange_tests();  ///< spread_rows
void add_activation_tests();
void add_expert_sum_tests();  ///< the gradients of biases
void add_fused_activation_tests();
void add_factor_tests();     ///< copies of low-rank factors
void add_quantised_tests();  ///< decoding, and the bits of decoded weights

/// Only a GPU has streams and graphs; without one these are skipped with the reason.
void add_graph_tests();
void add_concurrency_tests();
void add_layer_tests();
void add_plan_tests();  ///< plans of several steps, with memory for them and without
void add_stress_tests();

}  // namespace moegemm::testing
