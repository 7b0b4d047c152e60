// Tokens that an automaton lets through: a trie in depth-first order against a transition table.
#include "trie_walk.h"

#include <cstdint>
#include <vector>

namespace umbel {
namespace {

constexpr int32_t UNKNOWN = -2, NO_TOKEN = -1;

inline void allow(uint32_t* bits, int32_t token) { bits[token >> 5] |= 1u << (token & 31); }

// About half of the nodes have a token, in no order: without a branch that would be guessed wrong.
inline void allow_all(const TrieView& trie, uint32_t* bits, int32_t token) {
    const bool one = token >= 0;
    bits[one ? token >> 5 : 0] |= (uint32_t)one << (token & 31);
    if (token < NO_TOKEN) {
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
        const TrieNode* const nodes = trie_.nodes;
        const int32_t* table = *rows_.table;
        int32_t* const states = path_.states.data();
        int32_t* const ends = path_.ends.data();
        const int32_t last = work.end, top = nodes[work.begin].step >> 8;
        const long deepest = room - count + top;  // at this depth the room is used up; nothing is left on the way to it
        int32_t node = work.begin;
        long seen = visited;
        states[top - 1] = work.state;
        ends[top - 1] = last;
        while (node < last) {
            const TrieNode& here = nodes[node];
            const int32_t depth = here.step >> 8, before = states[depth - 1], byte = here.step & 0xff;
            if (seen >= stop || depth >= deepest) {
                leave(node, depth, top);
                break;
            }
            int32_t behind = table[(long)before * 256 + byte];
            if (behind == UNKNOWN) {
                if (!rows_.find(before, byte)) {
                    stopped = true;
                    leave(node, depth, top);
                    break;
                }
                table = *rows_.table;
                behind = table[(long)before * 256 + byte];
            }
            seen++;
            if (behind >= 0) {
                states[depth] = behind;
                ends[depth] = here.end;
                allow_all(trie_, bits_, here.token);
                node++;
            } else {
                node = here.end;
            }
        }
        visited = seen;
    }

    long count = 0, visited = 0;
    bool stopped = false;

  private:
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
