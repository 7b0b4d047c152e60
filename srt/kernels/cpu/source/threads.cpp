#include "threads.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace umbel {
namespace {

constexpr int SPINS = 4000;  // about 50 µs of pauses: longer than the gap between two loops of a step

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

thread_local int rank_here = 0;

class Team {
  public:
    ~Team() { resize(1); }

    void resize(int size) {
        stopping_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        stopping_.store(false);
        for (int rank = 1; rank < size; rank++) threads_.emplace_back([this, rank] { work(rank); });
        size_ = size;
    }

    int size() const { return size_; }

    void run(long chunks, void (*body)(void*, long), void* context) {
        body_ = body;
        context_ = context;
        finished_.store(0, std::memory_order_relaxed);
        left_.store(chunks, std::memory_order_release);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        while (claim()) {
        }
        long done;
        for (int spin = 0; (done = finished_.load(std::memory_order_acquire)) < chunks; spin++) {
            if (spin < SPINS)
                pause();
            else
                finished_.wait(done, std::memory_order_acquire);
        }
    }

  private:
    // A claim takes a chunk of the loop that runs now: the next loop starts only when every claimed chunk has finished.
    bool claim() {
        long left = left_.load(std::memory_order_acquire);
        while (left > 0) {
            if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) {
                body_(context_, left - 1);
                finished_.fetch_add(1, std::memory_order_acq_rel);
                finished_.notify_one();
                return true;
            }
        }
        return false;
    }

    void work(int rank) {
        rank_here = rank;
        uint32_t seen = epoch_.load(std::memory_order_acquire);
        while (!stopping_.load(std::memory_order_acquire)) {
            while (claim()) {
            }
            int spin = 0;
            while (epoch_.load(std::memory_order_acquire) == seen && spin++ < SPINS) pause();
            epoch_.wait(seen, std::memory_order_acquire);
            seen = epoch_.load(std::memory_order_acquire);
        }
    }

    int size_ = 1;
    std::vector<std::thread> threads_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<long> left_{0};
    alignas(64) std::atomic<long> finished_{0};
    void (*body_)(void*, long) = nullptr;
    void* context_ = nullptr;
};

Team& team() {
    static Team instance;
    return instance;
}

}  // namespace

int team_size() { return team().size(); }
int team_rank() { return rank_here; }
void run_chunks(long chunks, void (*body)(void*, long), void* context) { team().run(chunks, body, context); }

}  // namespace umbel

extern "C" {

void umbel_set_threads(int count) { umbel::team().resize(count < 1 ? 1 : count); }
int umbel_threads() { return umbel::team_size(); }

}  // extern "C"
