#include "threads.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "nodes.h"

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

// The chunks [first, end) of a loop that are left of one thread's run. Its owner takes the first, the others the last.
class alignas(64) Run {
  public:
    void reset(uint32_t first, uint32_t end) { span_.store(pack(first, end), std::memory_order_release); }

    bool take_first(long& chunk) {
        return take([&](uint32_t first, uint32_t end) { return chunk = first, pack(first + 1, end); });
    }
    bool take_last(long& chunk) {
        return take([&](uint32_t first, uint32_t end) { return chunk = end - 1, pack(first, end - 1); });
    }

  private:
    static uint64_t pack(uint32_t first, uint32_t end) { return (uint64_t)end << 32 | first; }

    template <class Rest>
    bool take(Rest&& rest) {
        uint64_t span = span_.load(std::memory_order_acquire);
        while ((uint32_t)span < span >> 32) {
            uint64_t left = rest((uint32_t)span, (uint32_t)(span >> 32));
            if (span_.compare_exchange_weak(span, left, std::memory_order_acq_rel)) return true;
        }
        return false;
    }

    std::atomic<uint64_t> span_{0};
};

class Team {
  public:
    std::string sysfs = "/sys";

    ~Team() { resize(1); }

    void resize(int size) {
        stopping_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        stopping_.store(false);
        size_ = size;
        nodes_ = size > 1 ? Nodes(sysfs.c_str(), size) : Nodes();
        runs_ = std::vector<Run>(size);
        for (int rank = 1; rank < size; rank++) {  // the caller, rank 0, is not ours to bind
            threads_.emplace_back([this, rank] { work(rank); });
            nodes_.bind(rank, threads_.back().native_handle());
        }
    }

    int size() const { return size_; }
    const Nodes& nodes() const { return nodes_; }

    void run(long chunks, void (*body)(void*, long), void* context) {
        body_ = body;
        context_ = context;
        finished_.store(0, std::memory_order_relaxed);
        for (int rank = 0; rank < size_; rank++)
            runs_[rank].reset((uint32_t)run_begin(chunks, rank, size_), (uint32_t)run_begin(chunks, rank + 1, size_));
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        while (claim(0)) {
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
    bool claim(int rank) {
        long chunk;
        bool found = runs_[rank].take_first(chunk);
        for (int other = 1; !found && other < size_; other++) found = runs_[(rank + other) % size_].take_last(chunk);
        if (!found) return false;
        body_(context_, chunk);
        finished_.fetch_add(1, std::memory_order_acq_rel);
        finished_.notify_one();
        return true;
    }

    void work(int rank) {
        rank_here = rank;
        uint32_t seen = epoch_.load(std::memory_order_acquire);
        while (!stopping_.load(std::memory_order_acquire)) {
            while (claim(rank)) {
            }
            int spin = 0;
            while (epoch_.load(std::memory_order_acquire) == seen && spin++ < SPINS) pause();
            epoch_.wait(seen, std::memory_order_acquire);
            seen = epoch_.load(std::memory_order_acquire);
        }
    }

    int size_ = 1;
    Nodes nodes_;
    std::vector<std::thread> threads_;
    std::vector<Run> runs_{1};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
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
const Nodes& team_nodes() { return team().nodes(); }
int team_rank() { return rank_here; }
void run_chunks(long chunks, void (*body)(void*, long), void* context) { team().run(chunks, body, context); }

}  // namespace umbel

extern "C" {

void umbel_set_threads(int count) { umbel::team().resize(count < 1 ? 1 : count); }
int umbel_threads() { return umbel::team_size(); }

// For tests: where the next teams read which nodes there are.
void umbel_set_sysfs(const char* root) { umbel::team().sysfs = root; }

}  // extern "C"
