// Multiplies one matrix in blocks on a foreign instruction set, for `test_blocks_elsewhere.py`: numbers come on the standard
// input (format, n, k, rows, bytes of a row, terms of an input as int64; the rows of blocks; x as float32), products
// leave on the output.
#include <cstdio>
#include <vector>

#include "blocks.h"

extern "C" void umbel_set_threads(int count);

int main() {
    using namespace umbel;
    int64_t head[6];
    if (std::fread(head, sizeof head, 1, stdin) != 1) return 1;
    Format format = (Format)head[0];
    long n = head[1], k = head[2], rows = head[3], row_bytes = head[4];
    std::vector<uint8_t> blocks(n * row_bytes);
    std::vector<float> x(rows * k), out(rows * n);
    if (std::fread(blocks.data(), 1, blocks.size(), stdin) != blocks.size()) return 1;
    if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) return 1;
    umbel_set_threads(2);
    MatrixPart part = create_part(format, 0, n, k, false);
    pack_blocks(part, 0, n, blocks.data(), row_bytes, 0);
    linear(Matrix{n, k, 1, &part, (int)head[5]}, x.data(), rows, k, nullptr, out.data(), n);
    umbel_set_threads(1);
    return std::fwrite(out.data(), sizeof(float), out.size(), stdout) == out.size() ? 0 : 1;
}
