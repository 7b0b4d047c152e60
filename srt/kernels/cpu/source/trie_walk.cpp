// Masks of tokens: a trie in depth-first order is walked along an automaton. The layout of the trie is explained in
// fsm/tokens/trie.py, work and what is allowed without a walk in fsm/tokens/masks.py.
#include <algorithm>
#include <bit>
#include <bitset>
#include <cstring>

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

namespace {

constexpr int32_t NO_TOKEN = -1;
constexpr long NODES_PER_FUEL = 4'096, NODES_PER_WALK = 1 << 16;
constexpr long EVERYTHING = 0, NOT_WORDS = 1, NOT_PLAIN = 2;  // sections
constexpr long FEW = 64, ROOM = 4'096;
constexpr int MOST_ENTERED = 64;
constexpr std::size_t FEWEST_FIRST = 26, MOST_WORD_SETS = 64;

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

bool is_word(int byte) {
    return (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

// The way from the top of a piece of work down to where the walk is.
struct Path {
    std::vector<int32_t> states, ends;  // by depth: the state behind a node, and where its subtree ends
};

class Walk {
  public:
    Walk(const TrieView& trie, Explorer& explorer, Path& path, uint32_t* bits, WorkItem* left)
        : trie_(trie), explorer_(explorer), path_(path), bits_(bits), left_(left) {}

    // Goes through one piece until `stop` nodes have been visited in all, `room` pieces have been left, or a transition is
    // not to be had.
    void through(const WorkItem& work, long stop, long room) {
        const TrieNode* const nodes = trie_.nodes;
        const int32_t* table = explorer_.automaton.table();
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
                if (!explorer_.find(before, byte)) {
                    stopped = true;
                    leave(node, depth, top);
                    break;
                }
                table = explorer_.automaton.table();
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
    Explorer& explorer_;
    Path& path_;
    uint32_t* bits_;
    WorkItem* left_;
};

}  // namespace

// Sets the bits of the tokens that are let through → pieces of work in `left`, when there is no fuel for a transition, or
// `limit` visited nodes or the room in `left` did not allow more. capacity: at least pieces + depth + 2.
long walk_trie(const TrieView& trie, Explorer& explorer, const WorkItem* work, long pieces, uint32_t* bits,
               WorkItem* left, long capacity, long limit, long* visited) {
    static thread_local Path path;
    path.states.resize(trie.depth + 1);
    path.ends.resize(trie.depth + 1);
    Walk walk(trie, explorer, path, bits, left);
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

// Tells whether a token that begins with `begun`, and is longer, is allowed: `begun` has led to the state. roots: [256]
// of the trie of all tokens.
bool goes_on(const TrieView& trie, const int32_t* roots, Automaton& automaton, std::span<const uint8_t> begun,
             int32_t state) {
    const TrieNode* const nodes = trie.nodes;
    if (begun.empty()) return false;
    int32_t found = roots[begun[0]];
    for (std::size_t i = 1; i < begun.size() && found != NONE; i++) {
        int32_t child = found + 1;
        while (child < nodes[found].end && (nodes[child].step & 0xff) != begun[i]) child = nodes[child].end;
        found = child < nodes[found].end ? child : NONE;
    }
    if (found == NONE) return false;
    const int32_t end = nodes[found].end, depth = nodes[found].step >> 8;
    std::vector<int32_t> states{state};  // by depth below the node
    int entered = 0;
    for (int32_t node = found + 1; node < end;) {
        states.resize((nodes[node].step >> 8) - depth);
        const int32_t following = automaton.step(states.back(), nodes[node].step & 0xff);
        if (following < 0) {
            node = nodes[node].end;
        } else if (nodes[node].token != NO_TOKEN || entered == MOST_ENTERED) {
            return true;
        } else {
            entered++;
            states.push_back(following);
            node++;
        }
    }
    return false;
}

// ------------------------------------------------------------------------------------------------ masks

// Lists the tokens of a mask in `few` → their number, FEW + 1 where they are more.
int64_t list_few(const uint32_t* bits, long words, int32_t* few) {
    constexpr long BLOCK = 32;  // words: most are 0
    int64_t count = 0;
    for (long begin = 0; begin < words; begin += BLOCK) {
        const long end = std::min(begin + BLOCK, words);
        uint32_t any = 0;
        for (long word = begin; word < end; word++) any |= bits[word];
        for (long word = begin; any && word < end; word++)
            for (uint32_t left = bits[word]; left; left &= left - 1) {
                if (count == FEW) return FEW + 1;
                few[count++] = int32_t(32 * word + std::countr_zero(left));
            }
    }
    return count;
}

void MaskMaker::resume(Explorer& explorer, MaskWork& work, uint32_t* bits) {
    Automaton& automaton = explorer.automaton;
    if (!work.begun) {
        if (!automaton.expanded(work.state)) {  // as a whole: all bytes have tokens that begin with them
            explorer.expand(work.state);
            if (explorer.empty()) return;
        }
        begin(automaton, work.state, bits, work.left);
        work.begun = true;
    }
    while (!work.left.empty()) {
        const auto pieces = long(work.left.size());
        left_.resize(pieces + tables_.trie.depth + ROOM);
        long visited = 0;
        const long count = walk_trie(tables_.trie, explorer, work.left.data(), pieces, bits, left_.data(),
                                     long(left_.size()), NODES_PER_WALK, &visited);
        work.left.assign(left_.begin(), left_.begin() + count);
        explorer.spend(1 + visited / NODES_PER_FUEL);
        if (explorer.empty() && count) return;
    }
    if (automaton.accepting(work.state))
        for (long word = 0; word < tables_.words; word++) bits[word] |= tables_.eos[word];
    work.finished = true;
}

// Allows the tokens that need no look; the work that finds the others.
void MaskMaker::begin(Automaton& automaton, int32_t state, uint32_t* bits, std::vector<WorkItem>& work) {
    const int64_t run = automaton.plain_run(state);
    const int64_t plain = run >= tables_.most_plain ? run : std::min<int64_t>(run, tables_.counted);
    if (plain > 0) {
        const int64_t row = std::min<int64_t>(plain, tables_.counted + 1);
        std::memcpy(bits, tables_.plain + row * tables_.words, tables_.words * sizeof(uint32_t));
        add_work(automaton, state, NOT_PLAIN, work);
        if (automaton.plain_limit(state) > plain)
            for (long section = NOT_PLAIN + 1; section < tables_.sections; section++)
                if (tables_.longest[section] < 0 || tables_.longest[section] > plain)
                    add_work(automaton, state, section, work);
        return;
    }
    const std::bitset<256> first = first_of_words(automaton, state);
    if (first.any())
        std::copy_n(word_bits(first).data(), tables_.words, bits);
    else
        std::fill_n(bits, tables_.words, 0);
    add_work(automaton, state, first.any() ? NOT_WORDS : EVERYTHING, work);
}

// The subtrees of dead bytes are left out: they lie megabytes apart, and looking at one is a cache miss.
void MaskMaker::add_work(const Automaton& automaton, int32_t state, long section, std::vector<WorkItem>& work) const {
    const int32_t* const roots = tables_.roots + section * 256;
    const int32_t* const row = automaton.row(state);
    for (int byte = 0; byte < 256; byte++)
        if (row[byte] >= 0 && roots[byte] >= 0) work.push_back({roots[byte], tables_.trie.nodes[roots[byte]].end, state});
}

// Letters and digits that lead to one state, from which all of them lead back to it; none without such a state. The
// others are dead.
std::bitset<256> MaskMaker::first_of_words(Automaton& automaton, int32_t state) const {
    std::bitset<256> first;
    int32_t target = NONE;
    for (int byte = 0; byte < 256; byte++) {
        if (!is_word(byte)) continue;
        const int32_t following = automaton.row(state)[byte];
        if (following < 0) continue;
        if (target != NONE && following != target) return {};
        target = following;
        first.set(byte);
    }
    if (first.count() < FEWEST_FIRST) return {};
    automaton.expand(target);
    for (int byte = 0; byte < 256; byte++)
        if (is_word(byte) && automaton.row(target)[byte] != target) return {};
    return first;
}

const std::vector<uint32_t>& MaskMaker::word_bits(const std::bitset<256>& first) {
    if (const auto known = words_.find(first); known != words_.end()) return known->second;
    if (words_.size() >= MOST_WORD_SETS) words_.clear();
    std::vector<uint32_t> bits(tables_.words);
    for (int byte = 0; byte < 256; byte++)
        if (first[byte])
            for (int32_t i = tables_.word_begins[byte]; i < tables_.word_begins[byte + 1]; i++)
                allow(bits.data(), tables_.word_tokens[i]);
    return words_.emplace(first, std::move(bits)).first->second;
}

}  // namespace umbel

using umbel::answer;
using umbel::Automaton;
using umbel::MaskMaker;
using umbel::MaskWork;

extern "C" {

// A walk along an automaton. fuel: what is left, of new transitions.
int64_t umbel_walk_trie(Automaton* automaton, int64_t* fuel, const umbel::TrieView* trie, const umbel::WorkItem* work,
                        long pieces, uint32_t* bits, umbel::WorkItem* left, long capacity, long limit, long* visited) {
    return answer(automaton, [&](Automaton& own) {
        umbel::Explorer explorer(own, *fuel);
        const long count = umbel::walk_trie(*trie, explorer, work, pieces, bits, left, capacity, limit, visited);
        *fuel = explorer.fuel();
        return int64_t(count);
    });
}

// roots: [256] of the trie of all tokens. 1 or 0.
int64_t umbel_goes_on(Automaton* automaton, const umbel::TrieView* trie, const int32_t* roots, const uint8_t* begun,
                      long length, int32_t state) {
    return answer(automaton, [&](Automaton& own) -> int64_t {
        return umbel::goes_on(*trie, roots, own, {begun, std::size_t(length)}, state);
    });
}

MaskMaker* umbel_masks(const umbel::MaskTables* tables) { return new MaskMaker(*tables); }

void umbel_masks_free(MaskMaker* masks) { delete masks; }

MaskWork* umbel_mask(int32_t state) { return new MaskWork{state, false, false, {}}; }

void umbel_mask_free(MaskWork* work) { delete work; }

// Works on → -1: not finished. When finished: the number of tokens, which are in `few`; or FEW + 1 where they are more.
int64_t umbel_mask_resume(MaskMaker* masks, Automaton* automaton, MaskWork* work, int64_t* fuel, uint32_t* bits,
                          int32_t* few) {
    return answer(automaton, [&](Automaton& own) -> int64_t {
        umbel::Explorer explorer(own, *fuel);
        masks->resume(explorer, *work, bits);
        *fuel = explorer.fuel();
        return work->finished ? umbel::list_few(bits, masks->tables().words, few) : -1;
    });
}

}  // extern "C"
