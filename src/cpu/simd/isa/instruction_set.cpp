#include "cpu/simd/isa/instruction_set.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "core/refusal.h"
#include "core/registry.h"
#include "core/types/names.h"
#include "moegemm/execution.h"

namespace moegemm::cpu::simd {
namespace {

struct Variant {
  InstructionSet value;
  const char* name;
  const KernelTable* (*kernels)();  ///< null where the compiler could not build them
};
/// Best first.
constexpr Variant kVariants[] = {
    {InstructionSet::kAvx512Bf16, "avx512bf16", avx512bf16_kernels},
    {InstructionSet::kAvx512, "avx512", avx512_kernels},
    {InstructionSet::kAvx2, "avx2", avx2_kernels},
    {InstructionSet::kPortable, "portable", portable_kernels},
};

/// What the processor has and the operating system saves.
bool machine_runs(InstructionSet isa) {
#if defined(__x86_64__)
#if defined(__clang__) && __clang_major__ < 16  // does not know these names
  const bool bf16 = false;
  const bool f16c = true;  // older than AVX2
#else
  const bool bf16 = __builtin_cpu_supports("avx512bf16");
  const bool f16c = __builtin_cpu_supports("f16c");
#endif
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case InstructionSet::kAvx512Bf16:
      return avx512 && bf16;
    case InstructionSet::kAvx512:
      return avx512;
    case InstructionSet::kAvx2:
      return avx2;
    case InstructionSet::kPortable:
      return true;
  }
#endif
  return isa == InstructionSet::kPortable;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) != 0 && line.rfind("Model", 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t name = line.find_first_not_of(" \t", colon + 1);
    if (name != std::string::npos) return line.substr(name);
  }
  return "unknown processor";
}

}  // namespace

const char* to_string(InstructionSet isa) { return name_in(kVariants, isa); }

std::vector<InstructionSet> usable_instruction_sets() {
  std::vector<InstructionSet> usable;
  for (const Variant& variant : kVariants) {
    if (variant.kernels() != nullptr && machine_runs(variant.value)) {
      usable.push_back(variant.value);
    }
  }
  return usable;
}

InstructionSet select_instruction_set(const char* requested) {
  const std::vector<InstructionSet> usable = usable_instruction_sets();
  if (requested == nullptr || *requested == '\0') return usable.front();
  std::string accepted;
  for (InstructionSet isa : usable) {
    if (requested == std::string(to_string(isa))) return isa;
    accepted += join(accepted.empty() ? "" : ", ", to_string(isa));
  }
  const bool known = find_named(kVariants, requested).has_value();
  refuse_value("MOEGEMM_CPU_ISA is '", requested, "'",
               known ? ", which this machine or this build does not have" : "",
               "; accepted here: ", accepted);
}

InstructionSet active_instruction_set() {
  // A value that was refused throws again at the next call.
  static const InstructionSet isa = select_instruction_set(std::getenv("MOEGEMM_CPU_ISA"));
  return isa;
}

const KernelTable& kernels_of(InstructionSet isa) {
  return *std::find_if(std::begin(kVariants), std::end(kVariants), [isa](const Variant& variant) {
            return variant.value == isa;
          })->kernels();
}

}  // namespace moegemm::cpu::simd

namespace moegemm {

CpuInfo query_cpu() {
  CpuInfo info;
  info.model = cpu::simd::processor_name();
  info.threads = default_executor().concurrency();
  info.isa = to_string(cpu::simd::active_instruction_set());
  for (auto isa : cpu::simd::usable_instruction_sets()) info.isas.emplace_back(to_string(isa));
  return info;
}

}  // namespace moegemm
