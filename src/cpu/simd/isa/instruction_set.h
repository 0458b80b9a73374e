#pragma once

#include <string>
#include <vector>

#include "core/backend.h"
#include "cpu/simd/kernel_table.h"

namespace moegemm::cpu::simd {

enum class InstructionSet { kAvx512Bf16, kAvx512, kAvx2, kPortable };

/// "avx512bf16", "avx512", "avx2", "portable"
const char* to_string(InstructionSet isa);

/// Those that were compiled and that this machine runs, best first.
std::vector<InstructionSet> usable_instruction_sets();

/// The one to use when `requested` (the value of MOEGEMM_CPU_ISA, or null) asks for it; throws for
/// any word that is not the name of a usable one.
InstructionSet select_instruction_set(const char* requested);

/// select_instruction_set for this process, decided at the first call.
InstructionSet active_instruction_set();

const KernelTable& kernels_of(InstructionSet isa);

/// cpu_backend() tied to one instruction set, which must be usable.
const Backend& backend_for(InstructionSet isa);

}  // namespace moegemm::cpu::simd
