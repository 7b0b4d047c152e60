#include "memory.h"

#include <sys/mman.h>

#include <cstdint>

namespace umbel {
namespace {

constexpr size_t PAGE = size_t(2) << 20;
constexpr size_t SMALL_PAGE = size_t(64) << 10;  // a multiple of every system's

// The last piece stays in small pages: models of many small matrices would waste a third of their memory.
size_t whole_pages(size_t bytes) { return (bytes + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE; }

}  // namespace

void* allocate_pages(size_t bytes) {
    size_t size = whole_pages(bytes);
    char* base = (char*)mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    char* aligned = (char*)(((uintptr_t)base + PAGE - 1) / PAGE * PAGE);
    if (aligned > base) munmap(base, aligned - base);
    char* end = base + size + PAGE;
    if (end > aligned + size) munmap(aligned + size, end - (aligned + size));
#ifdef MADV_HUGEPAGE
    if (size >= PAGE) madvise(aligned, size / PAGE * PAGE, MADV_HUGEPAGE);
#endif
    return aligned;
}

void free_pages(void* pointer, size_t bytes) {
    if (pointer) munmap(pointer, whole_pages(bytes));
}

void* Buffer::grow(size_t bytes) {
    if (bytes > size_) {
        free_pages(data_, size_);
        size_ = whole_pages(bytes + bytes / 4);
        data_ = allocate_pages(size_);
        if (!data_) size_ = 0;
    }
    return data_;
}

}  // namespace umbel

extern "C" {

void* umbel_allocate(long bytes) { return umbel::allocate_pages(bytes); }
void umbel_free(void* pointer, long bytes) { umbel::free_pages(pointer, bytes); }

}  // extern "C"
