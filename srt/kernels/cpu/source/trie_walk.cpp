// Tokens that an automaton lets through: a trie in depth-first order against a transition table.
#include "trie_walk.h"

#include <cstdint>
#include <vector>

namespace umbel {
namespace {

constexpr int32_t UNKNOWN = -2, NO_TOKEN = -1;

inline void allow(uint32_t* bits, int32_t token) { bits[token >> 5] |= 1u << (token & 31); }

inline void allow_all(const TrieView& trie, uint32_t* bits, int32_t token) {
    if (token >= 0) {
        allow(bits, token);
    } else if (token != NO_TOKEN) {
        const int32_t* group = trie.groups + (-2 - token);
        for (int32_t i = 1; i <= group[0]; i++) allow(bits, group[i]);
    }
}

// The way from the top of a piece of work down to where the walk is.
struct Path {
    std::vector<int32_t> states, ends;  // by depth: the state behind a node, and where its subtree ends
};

class Walk {
  public:
    Walk(const TrieView& trie, const Rows& rows, Path& path, uint32_t* bits, WorkItem* left)
        : trie_(trie), rows_(rows), path_(path), bits_(bits), left_(left) {}

    // Goes through one piece until `stop` nodes have been visited in all, `room` pieces have been left, or a transition is
    // not to be had.
    void through(const WorkItem& work, long stop, long room) {
        int32_t node = work.begin;
        const int32_t top = trie_.nodes[node].step >> 8;
        path_.states[top - 1] = work.state;
        path_.ends[top - 1] = work.end;
        while (node < work.end) {
            const TrieNode& here = trie_.nodes[node];
            const int32_t depth = here.step >> 8, before = path_.states[depth - 1];
            if (visited >= stop || count + depth - top >= room) return leave(node, depth, top);
            const int32_t byte = here.step & 0xff;
            int32_t behind = next(before, byte);
            if (behind == UNKNOWN) {
                if (!rows_.find(before, byte)) {
                    stopped = true;
                    return leave(node, depth, top);
                }
                behind = next(before, byte);
            }
            visited++;
            if (behind >= 0) {
                path_.states[depth] = behind;
                path_.ends[depth] = here.end;
                allow_all(trie_, bits_, here.token);
                node++;
            } else {
                node = here.end;
            }
        }
    }

    long count = 0, visited = 0;
    bool stopped = false;

  private:
    int32_t next(int32_t state, int32_t byte) const { return (*rows_.table)[(long)state * 256 + byte]; }

    // What has not been visited: the siblings from `node` on, and those behind each node above it.
    void leave(int32_t node, int32_t depth, int32_t top) {
        for (; depth >= top; depth--) {
            const int32_t end = path_.ends[depth - 1];
            if (node < end) left_[count++] = {node, end, path_.states[depth - 1]};
            node = end;
        }
    }

    const TrieView& trie_;
    const Rows& rows_;
    Path& path_;
    uint32_t* bits_;
    WorkItem* left_;
};

}  // namespace

long walk_trie(const TrieView& trie, const Rows& rows, const WorkItem* work, long pieces, uint32_t* bits, WorkItem* left,
               long capacity, long limit, long* visited) {
    static thread_local Path path;
    path.states.resize(trie.depth + 1);
    path.ends.resize(trie.depth + 1);
    Walk walk(trie, rows, path, bits, left);
    for (long i = 0; i < pieces; i++) {
        // Every piece that follows may have to be left as it is, and this one at each depth.
        long room = capacity - (pieces - i) - 1;
        if (walk.stopped || walk.visited >= limit || walk.count >= room)
            left[walk.count++] = work[i];
        else
            walk.through(work[i], limit, room);
    }
    *visited = walk.visited;
    return walk.count;
}

}  // namespace umbel

extern "C" long umbel_walk_trie(const umbel::TrieNode* nodes, const int32_t* groups, long depth,
                                const int32_t* const* table, int (*find)(int32_t, int32_t), const umbel::WorkItem* work,
                                long pieces, uint32_t* bits, umbel::WorkItem* left, long capacity, long limit,
                                long* visited) {
    return umbel::walk_trie({nodes, groups, depth}, {table, find}, work, pieces, bits, left, capacity, limit, visited);
}
