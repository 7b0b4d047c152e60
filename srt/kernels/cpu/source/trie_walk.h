// Masks of tokens: a trie in depth-first order is walked along an automaton. The layout of the trie is explained in
// fsm/tokens/trie.py, work and what is allowed without a walk in fsm/tokens/masks.py.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "automaton.h"

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

// Finds transitions for a walk while there is fuel, a unit of which lasts for eight of them, 10 us.
class Explorer {
  public:
    Explorer(Automaton& automaton, int64_t fuel) : automaton(automaton), left_(STEPS_PER_FUEL * fuel) {}

    int64_t fuel() const { return std::max<int64_t>(left_ / STEPS_PER_FUEL, 0); }
    bool empty() const { return left_ <= 0; }
    void spend(int64_t fuel) { left_ -= STEPS_PER_FUEL * fuel; }

    void expand(int32_t state) {
        const int64_t before = automaton.work();
        automaton.expand(state);
        left_ -= std::max<int64_t>(1, automaton.work() - before);
    }
    bool find(int32_t state, int32_t byte) {  // false: not now
        if (empty()) return false;
        const int64_t before = automaton.work();
        automaton.step(state, byte);
        left_ -= std::max<int64_t>(1, automaton.work() - before);
        return true;
    }

    Automaton& automaton;

  private:
    static constexpr int64_t STEPS_PER_FUEL = 8;
    int64_t left_;  // in steps
};

// Sets the bits of the tokens that are let through → pieces of work in `left`, when there is no fuel for a transition, or
// `limit` visited nodes or the room in `left` did not allow more. capacity: at least pieces + depth + 2.
long walk_trie(const TrieView& trie, Explorer& explorer, const WorkItem* work, long pieces, uint32_t* bits,
               WorkItem* left, long capacity, long limit, long* visited);

// Tells whether a token that begins with `begun`, and is longer, is allowed: `begun` has led to the state. roots: [256]
// of the trie of all tokens.
bool goes_on(const TrieView& trie, const int32_t* roots, Automaton& automaton, std::span<const uint8_t> begun,
             int32_t state);

// What the masks of one vocabulary share. The arrays are Python's.
struct MaskTables {
    TrieView trie;
    long words;
    const int32_t* roots;      // [sections, 256] the first node of each byte; -1: no token begins with it
    long sections;             // everything, not words, not plain, then plain by their number of characters
    const int32_t* longest;    // [sections] most characters of a class of plain tokens; -1: any number
    const uint32_t* plain;     // [counted + 2, words] the plain tokens of at most 0, 1, 2, ... characters, and all
    long counted, most_plain;  // characters
    const int32_t* word_tokens;  // tokens of letters and digits by their first byte
    const int32_t* word_begins;  // [257]
    const uint32_t* eos;         // [words]
};

// One mask in the making.
struct MaskWork {
    int32_t state;
    bool begun = false, finished = false;
    std::vector<WorkItem> left;
};

class MaskMaker {
  public:
    explicit MaskMaker(const MaskTables& tables) : tables_(tables) {}

    const MaskTables& tables() const { return tables_; }

    // Works on a mask until it is finished or the fuel is used up. bits: [words], written when it is begun.
    void resume(Explorer& explorer, MaskWork& work, uint32_t* bits);

  private:
    std::bitset<256> first_of_words(Automaton& automaton, int32_t state) const;
    const std::vector<uint32_t>& word_bits(const std::bitset<256>& first);
    void begin(Automaton& automaton, int32_t state, uint32_t* bits, std::vector<WorkItem>& work);
    void add_work(const Automaton& automaton, int32_t state, long section, std::vector<WorkItem>& work) const;

    MaskTables tables_;
    std::unordered_map<std::bitset<256>, std::vector<uint32_t>> words_;
    std::vector<WorkItem> left_;
};

}  // namespace umbel
