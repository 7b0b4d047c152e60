// System headers that most sources include. They are compiled once for each instruction set (library.py), ahead of the
// sources: without, reading them is half the time of a build. Sources include what they use as if this were not there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
