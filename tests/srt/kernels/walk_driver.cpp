// Repeats recorded calls of the automaton and the walk on a foreign instruction set, for `test_elsewhere.py`, and ends with
// the number of the first call that gives another result than the recorded one; 0: none does.
//
// A record on the standard input is int64: the call, how many numbers, the numbers, how many bytes; then the bytes, padded
// to 8. A call is followed by what it asked for, each time up to an ANSWER, and by its RESULT.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "automaton.h"

using umbel::Automaton;

extern "C" {
Automaton* umbel_automaton(int64_t states, int64_t depth, int64_t ambiguity, int64_t forced_bytes, umbel::Ask ask,
                           int64_t number);
void umbel_automaton_free(Automaton*);
void umbel_automaton_node(Automaton*, int32_t node, int32_t kind, const int64_t* numbers, long levels, long count);
void umbel_automaton_parts(Automaton*, const int64_t* parts, long count);
int32_t umbel_automaton_text(Automaton*, const uint8_t* data, long length);
int32_t umbel_automaton_trie(Automaton*, const uint8_t* data, const int64_t* options, long count);
int32_t umbel_automaton_character(Automaton*, const int32_t* ranges, long count, int32_t spelled, int64_t shortest,
                                  int64_t plain);
int32_t umbel_automaton_never(Automaton*, int64_t shortest, int64_t plain);
int32_t umbel_automaton_states(Automaton*, const int64_t* shortest, const uint8_t* flags, long count, int32_t spelled);
int32_t umbel_automaton_state(Automaton*, int32_t owner, int32_t state);
int32_t umbel_automaton_begun_state(Automaton*, int32_t owner, int32_t state, int64_t shortest);
void umbel_automaton_characters(Automaton*, const int32_t* characters, long count);
int64_t umbel_automaton_start(Automaton*, int32_t root);
int64_t umbel_automaton_step(Automaton*, int32_t state, int32_t byte);
int64_t umbel_automaton_run(Automaton*, int32_t state, const uint8_t* data, long length);
int64_t umbel_automaton_expand(Automaton*, int32_t state);
int64_t umbel_automaton_forced(Automaton*, int32_t state, const uint8_t** text);
int64_t umbel_automaton_close(Automaton*, int32_t state, const uint8_t** text);
int64_t umbel_automaton_close_length(Automaton*, int32_t state);
int64_t umbel_automaton_plain_run(Automaton*, int32_t state);
int64_t umbel_automaton_plain_limit(Automaton*, int32_t state);
int64_t umbel_automaton_lookahead(Automaton*, int32_t state, int64_t reach);
int64_t umbel_walk_trie(Automaton*, int64_t* fuel, const void* trie, const void* work, long pieces, uint32_t* bits,
                        void* left, long capacity, long limit, long* visited);
}

namespace {

enum Call : int64_t {  // `CALLS` of test_elsewhere.py
    MAKE, NODE, PARTS, TEXT, TRIE, CHARACTER, NEVER, STATES, STATE, BEGUN_STATE, CHARACTERS, START, STEP, RUN, EXPAND,
    FORCED, CLOSE, CLOSE_LENGTH, PLAIN_RUN, PLAIN_LIMIT, LOOKAHEAD, WALK, ANSWER, RESULT, ROW, VIEW,
};

struct Record {
    int64_t call = 0;
    std::vector<int64_t> numbers, bytes;  // bytes: padded
    int64_t length = 0;                   // of the bytes

    int64_t operator[](size_t i) const { return numbers.at(i); }
    const uint8_t* data() const { return (const uint8_t*)bytes.data(); }
    const int64_t* longs() const { return bytes.data(); }
    const int32_t* ints() const { return (const int32_t*)bytes.data(); }
};

bool read(std::vector<int64_t>& numbers, int64_t count) {
    numbers.resize(count);
    return std::fread(numbers.data(), 8, count, stdin) == (size_t)count;
}

bool read(Record& record) {
    std::vector<int64_t> head, length;
    if (!read(head, 2) || !read(record.numbers, head[1]) || !read(length, 1)) return false;
    record.call = head[0];
    record.length = length[0];
    return read(record.bytes, (record.length + 7) / 8);
}

Automaton* automaton = nullptr;
Record view;  // of a trie: how many nodes, the depth, words of a mask; nodes, then groups

int64_t done(const Record& call, std::vector<uint8_t>& found);

int64_t ask(int64_t, int32_t, int32_t, int32_t) {
    std::vector<uint8_t> none;
    for (Record record; read(record); done(record, none))
        if (record.call == ANSWER) return record[0];
    std::exit(255);  // it asks for what was not asked for
}

int64_t walk(int64_t state, int64_t end, std::vector<uint8_t>& found) {
    struct {
        const void *nodes, *groups;
        long depth;
    } trie{view.data(), view.data() + 12 * view[0], (long)view[1]};
    int32_t work[3] = {0, (int32_t)end, (int32_t)state};
    std::vector<int32_t> left(3 * (view[1] + 100));
    std::vector<uint32_t> bits(view[2]);
    int64_t fuel = 1 << 20;
    long visited = 0;
    int64_t count = umbel_walk_trie(automaton, &fuel, &trie, work, 1, bits.data(), left.data(), view[1] + 100, 1 << 30,
                                    &visited);
    found.assign((uint8_t*)bits.data(), (uint8_t*)(bits.data() + bits.size()));
    return count;
}

// Makes a call → its result; `found`: the bytes that belong to it.
int64_t done(const Record& r, std::vector<uint8_t>& found) {
    const uint8_t* text = nullptr;
    auto written = [&](int64_t length) { return found.assign(text, text + (length > 0 ? length : 0)), length; };
    switch (r.call) {
        case MAKE:
            umbel_automaton_free(automaton);
            automaton = umbel_automaton(r[0], r[1], r[2], r[3], ask, 0);
            return 0;
        case VIEW: return view = r, 0;
        case NODE: return umbel_automaton_node(automaton, r[0], r[1], r.longs(), r[2], r[3]), 0;
        case PARTS: return umbel_automaton_parts(automaton, r.longs(), r[0]), 0;
        case TEXT: return umbel_automaton_text(automaton, r.data(), r.length);
        case TRIE: return umbel_automaton_trie(automaton, r.data() + 24 * r[0], r.longs(), r[0]);
        case CHARACTER: return umbel_automaton_character(automaton, r.ints(), r[0], r[1], r[2], r[3]);
        case NEVER: return umbel_automaton_never(automaton, r[0], r[1]);
        case STATES: return umbel_automaton_states(automaton, r.longs(), r.data() + 8 * r[0], r[0], r[1]);
        case STATE: return umbel_automaton_state(automaton, r[0], r[1]);
        case BEGUN_STATE: return umbel_automaton_begun_state(automaton, r[0], r[1], r[2]);
        case CHARACTERS: return umbel_automaton_characters(automaton, r.ints(), r[0]), 0;
        case START: return umbel_automaton_start(automaton, r[0]);
        case STEP: return umbel_automaton_step(automaton, r[0], r[1]);
        case RUN: return umbel_automaton_run(automaton, r[0], r.data(), r.length);
        case EXPAND: return umbel_automaton_expand(automaton, r[0]);
        case FORCED: return written(umbel_automaton_forced(automaton, r[0], &text));
        case CLOSE: return written(umbel_automaton_close(automaton, r[0], &text));
        case CLOSE_LENGTH: return umbel_automaton_close_length(automaton, r[0]);
        case PLAIN_RUN: return umbel_automaton_plain_run(automaton, r[0]);
        case PLAIN_LIMIT: return umbel_automaton_plain_limit(automaton, r[0]);
        case LOOKAHEAD: return umbel_automaton_lookahead(automaton, r[0], r[1]);
        case WALK: return walk(r[0], r[1], found);
        case ROW: text = (const uint8_t*)automaton->row((int32_t)r[0]); return written(1024);
        default: std::exit(254);
    }
}

}  // namespace

int main() {
    int number = 0;
    std::vector<uint8_t> found;
    int64_t result = 0;
    for (Record record; read(record);) {
        if (record.call != RESULT) {
            found.clear();
            result = done(record, found);
            continue;
        }
        number++;
        bool same = result == record[0] && (int64_t)found.size() == record.length;
        if (!same || std::memcmp(found.data(), record.data(), found.size()) != 0) {
            std::printf("%d\n", number);
            return 1;
        }
    }
    umbel_automaton_free(automaton);
    std::printf("0 of %d\n", number);
    return 0;
}
