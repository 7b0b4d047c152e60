// Multiplies one matrix in blocks, integers or codes on a foreign instruction set, for `test_elsewhere.py`: numbers come on
// the standard input (the head as int64; codes; scales; zeros or the table; x as float32), products leave on the output.
#include <cstdio>
#include <vector>

#include "blocks.h"

extern "C" void umbel_set_threads(int count);

namespace {

struct Head {
    int64_t format, n, k, rows, terms, group;  // terms of an input; inputs that share a scale, 0: blocks
    int64_t bytes[3];                          // of codes or rows of blocks; scales; zeros or the table
};

template <class T>
bool read(std::vector<T>& numbers) {
    return std::fread(numbers.data(), sizeof(T), numbers.size(), stdin) == numbers.size();
}

}  // namespace

int main() {
    using namespace umbel;
    Head head;
    if (std::fread(&head, sizeof head, 1, stdin) != 1) return 1;
    Format format = (Format)head.format;
    long n = head.n, k = head.k, rows = head.rows;
    std::vector<uint8_t> codes(head.bytes[0]), scales(head.bytes[1]), rest(head.bytes[2]);
    std::vector<float> x(rows * k), out(rows * n);
    if (!read(codes) || !read(scales) || !read(rest) || !read(x)) return 1;
    const uint8_t* last = rest.empty() ? nullptr : rest.data();
    umbel_set_threads(2);
    MatrixPart part = create_part(format, 0, n, k, false, head.group);
    if (is_coded(format))
        pack_codes(part, 0, n, codes.data(), (const float*)scales.data(), (const float*)last);
    else if (head.group)
        pack_integers(part, 0, n, codes.data(), (const f16*)scales.data(), last);
    else
        pack_blocks(part, 0, n, codes.data(), head.bytes[0] / n, 0);
    linear(Matrix{n, k, 1, &part, (int)head.terms}, x.data(), rows, k, nullptr, out.data(), n);
    umbel_set_threads(1);
    return std::fwrite(out.data(), sizeof(float), out.size(), stdout) == out.size() ? 0 : 1;
}
