#pragma once
// The instructions that vectorised variants are written in, where there are any.

#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 sees ghosts in its own intrinsics
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
