// Memory in 2 MiB pages where the system grants them: weights and pool are streamed, and 4 KiB pages cost a third of
// the machine's read speed.
#pragma once

#include <cstddef>

namespace umbel {

void* allocate_pages(size_t bytes);  // zeroed, 64-byte aligned; nullptr when there is none
void free_pages(void* pointer, size_t bytes);

// Memory that only grows and is used again at every step. Not shared between threads that run at the same time.
class Buffer {
  public:
    ~Buffer() { free_pages(data_, size_); }
    // At least `bytes`, content undefined; nullptr when there is no memory.
    template <class T>
    T* take(size_t count) {
        return (T*)grow(count * sizeof(T));
    }

  private:
    void* grow(size_t bytes);
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace umbel
