// Runs the self-check of the kernels on a foreign instruction set, and what it compares also with other teams of threads,
// for `test_elsewhere.py`.
#include <initializer_list>

#include "check_kernels.h"

extern "C" int umbel_self_check();
extern "C" void umbel_set_threads(int count);

int main() {
    using namespace umbel;
    if (int status = umbel_self_check()) return status;
    for (int threads : {1, 4}) {
        umbel_set_threads(threads);
        if (!linears_work() || !attention_works() || !heads_work()) return 10 + threads;
    }
    umbel_set_threads(1);
    return 0;
}
