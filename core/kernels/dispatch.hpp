#pragma once
// Which instruction set the kernels use: the best one of this CPU, found at first use. Only tests change it.
// Every level gives the same bits; a level is only faster or slower.

#include <cstdint>

#if defined(__x86_64__)
#define TELEGRAD_KERNELS_X86 1
#define TELEGRAD_AVX2 __attribute__((target("avx2,f16c,bmi,bmi2,popcnt")))
#define TELEGRAD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,bmi,bmi2,popcnt")))
#define TELEGRAD_AVX512_VBMI2 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx2,f16c,bmi,bmi2,popcnt")))
#endif

namespace telegrad::kernels {

enum class SimdLevel : std::uint8_t {
  portable = 0,
  avx2 = 1,
  avx512 = 2,
  avx512_vbmi2 = 3,  // which packs bytes, too: Ice Lake, Zen 4 and what came after
};
inline constexpr SimdLevel kSimdLevels[] = {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512,
                                            SimdLevel::avx512_vbmi2};

const char* name_of(SimdLevel level);

/// The best level that this CPU and this build have.
SimdLevel best_simd_level();

/// The level in use.
SimdLevel simd_level();

/// For tests: every kernel called from now on, on any thread, uses `level`. CHECKs that the CPU has it.
void force_simd_level(SimdLevel level);

/// For tests: forces a level for one scope.
class ScopedSimdLevel {
 public:
  explicit ScopedSimdLevel(SimdLevel level) : before_(simd_level()) { force_simd_level(level); }
  ScopedSimdLevel(const ScopedSimdLevel&) = delete;
  ScopedSimdLevel& operator=(const ScopedSimdLevel&) = delete;
  ~ScopedSimdLevel() { force_simd_level(before_); }

 private:
  SimdLevel before_;
};

/// One kernel's variants. A missing variant stands for the next lower one.
template <class Function>
struct Variants {
  Function* portable;
  Function* avx2 = nullptr;
  Function* avx512 = nullptr;
  Function* avx512_vbmi2 = nullptr;

  Function* at(SimdLevel level) const {
    if (level == SimdLevel::avx512_vbmi2 && avx512_vbmi2 != nullptr) return avx512_vbmi2;
    if (level >= SimdLevel::avx512 && avx512 != nullptr) return avx512;
    if (level != SimdLevel::portable && avx2 != nullptr) return avx2;
    return portable;
  }
  template <class... Arguments>
  auto operator()(const Arguments&... arguments) const {
    return at(simd_level())(arguments...);
  }
};

}  // namespace telegrad::kernels
