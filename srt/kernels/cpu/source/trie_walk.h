// The layout of fsm/tokens/trie.py and the work of fsm/tokens/trie_walk.py, where they are explained.
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

// Sets the bits of the tokens that are let through → pieces of work in `left`: where the table is not known, and what
// `limit` visited nodes or the room in `left` did not allow. capacity: at least pieces + depth + 2.
long walk_trie(const TrieView& trie, const int32_t* table, const WorkItem* work, long pieces, uint32_t* bits,
               WorkItem* left, long capacity, long limit, long* visited);

}  // namespace umbel
