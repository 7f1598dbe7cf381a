#include "kernels/dispatch.hpp"

#include <atomic>

#include "base/check.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include <cpuid.h>
#endif

namespace telegrad::kernels {
namespace {

#ifdef TELEGRAD_KERNELS_X86
// Not every clang has this name for __builtin_cpu_supports().
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

SimdLevel detect() {
#ifdef TELEGRAD_KERNELS_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c() &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return __builtin_cpu_supports("avx512vbmi2") ? SimdLevel::avx512_vbmi2 : SimdLevel::avx512;
  if (avx2) return SimdLevel::avx2;
#endif
  return SimdLevel::portable;
}

std::atomic<SimdLevel>& level_in_use() {
  static std::atomic<SimdLevel> level{best_simd_level()};
  return level;
}

}  // namespace

const char* name_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::portable: return "portable";
    case SimdLevel::avx2: return "avx2";
    case SimdLevel::avx512: return "avx512";
    case SimdLevel::avx512_vbmi2: return "avx512_vbmi2";
  }
  return "unknown";
}

SimdLevel best_simd_level() {
  static const SimdLevel best = detect();
  return best;
}

SimdLevel simd_level() { return level_in_use().load(std::memory_order_relaxed); }

void force_simd_level(SimdLevel level) {
  TELEGRAD_CHECK(level <= best_simd_level());
  level_in_use().store(level, std::memory_order_relaxed);
}

}  // namespace telegrad::kernels
