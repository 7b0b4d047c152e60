// The layout of fsm/tokens/trie.py and the work of fsm/tokens/masks.py, where they are explained.
#pragma once

#include <cstdint>

namespace umbel {

struct TrieNode {
    int32_t end;    // of the subtree
    int32_t token;  // an id, -1 for none, or -2 - i for the groups[i] ids that follow there
    int32_t step;   // depth << 8 | byte
};

struct TrieView {
    const TrieNode* nodes;
    const int32_t* groups;
    long depth;  // of the deepest node
};

struct WorkItem {
    int32_t begin, end;  // sibling nodes with all below them
    int32_t state;       // before them
};

// The transitions, some of them not known yet.
struct Rows {
    const int32_t* const* table;                // [states, 256] where the table lies now: `find` may move it
    int (*find)(int32_t state, int32_t byte);  // makes an entry known; 0: not now
};

// Sets the bits of the tokens that are let through → pieces of work in `left`, when `find` has said no, or `limit`
// visited nodes or the room in `left` did not allow more. capacity: at least pieces + depth + 2.
long walk_trie(const TrieView& trie, const Rows& rows, const WorkItem* work, long pieces, uint32_t* bits, WorkItem* left,
               long capacity, long limit, long* visited);

}  // namespace umbel
