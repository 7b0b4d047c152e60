// A team of threads that share loops. Every thread has a run of neighbouring chunks, so that it reads memory from the
// front, and claims them one by one; one that has finished takes chunks from the ends of the others' runs. So a thread
// that has lost its core to another process delays a loop by one chunk at most, and a thread that sleeps not at all.
#pragma once

#include <type_traits>

namespace umbel {

class Nodes;

int team_size();
const Nodes& team_nodes();

// Where the run of a rank begins among the chunks of a loop. It ends where that of the next rank begins.
inline long run_begin(long chunks, int rank, int size) { return chunks * rank / size; }

// Runs body(context, chunk) for chunk in [0, chunks). Returns when all have run. Called by one thread at a time, never
// from inside a body.
void run_chunks(long chunks, void (*body)(void* context, long chunk), void* context);

// body(begin, end) over [0, count), in chunks of `grain`.
template <class Body>
void parallel(long count, long grain, Body&& body) {
    if (count <= 0) return;
    long chunks = (count + grain - 1) / grain;
    if (chunks == 1 || team_size() == 1) {
        body(0L, count);
        return;
    }
    struct Loop {
        std::remove_reference_t<Body>* body;
        long count, grain;
    } loop{&body, count, grain};
    run_chunks(
        chunks,
        [](void* context, long chunk) {
            Loop* loop = (Loop*)context;
            long begin = chunk * loop->grain;
            long end = begin + loop->grain < loop->count ? begin + loop->grain : loop->count;
            (*loop->body)(begin, end);
        },
        &loop);
}

// A grain that gives every thread about `per_thread` chunks, in multiples of `multiple`.
inline long even_grain(long count, long per_thread, long multiple = 1) {
    long chunks = (long)team_size() * per_thread;
    long grain = (count + chunks - 1) / chunks;
    grain = (grain + multiple - 1) / multiple * multiple;
    return grain > 0 ? grain : multiple;
}

// Which thread of the team runs this body: [0, team_size()), 0 is the caller. For scratch memory of one thread.
int team_rank();

}  // namespace umbel
