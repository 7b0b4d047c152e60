// The lazy byte automaton of fsm/automaton, step by step as it is explained there: places.py, nodes.py, frames.py,
// lookahead.py, automaton.py. The same calls in the same order make the same states with the same numbers.
//
// Python lowers a grammar to nodes. They are asked for one by one, when a text first comes to them, and so are the
// parts of objects in any order and the states of character automata, which Python makes while texts go on.
#pragma once

#include <cstdint>
#include <deque>
#include <new>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace umbel {

constexpr int64_t ENDLESS = int64_t(1) << 60;
constexpr int64_t MOST_LENGTH = int64_t(1) << 62;  // where sums and products of ENDLESS stop
constexpr int32_t DEAD = -1, UNKNOWN = -2, NONE = -1;

// What Python is asked for: it answers by a call of `umbel_automaton_node`, `_characters` or `_parts`, or by a number.
// -1: it has failed, and keeps the error until the call that it came up in is over.
enum class Question : int32_t { NODE, BODY, SHORTEST_PARTS, CHARACTERS, PLAIN };
using Ask = int64_t (*)(int64_t automaton, int32_t question, int32_t id, int32_t depth);

// Ends a call of the library; what it has found so far stays.
enum class Failure : int32_t { AMBIGUITY = -3, STATES = -4, PYTHON = -5, MEMORY = -6 };

struct Limits {
    int64_t states, depth, ambiguity, forced_bytes;
};

class Asking {
  public:
    Asking(Ask ask, int64_t automaton) : ask_(ask), automaton_(automaton) {}

    int64_t count() const { return count_; }

    int64_t operator()(Question question, int32_t id, int32_t depth = 0) const {
        count_++;
        const int64_t answer = ask_(automaton_, static_cast<int32_t>(question), id, depth);
        if (answer < 0) throw Failure::PYTHON;
        return answer;
    }

  private:
    Ask ask_;
    int64_t automaton_;
    mutable int64_t count_ = 0;
};

struct HashVector {
    template <typename T>
    std::size_t operator()(const std::vector<T>& values) const {
        std::uint64_t hash = values.size();
        for (T value : values) hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
        return hash;
    }
};

template <typename T, typename Value>
using VectorMap = std::unordered_map<std::vector<T>, Value, HashVector>;

// ------------------------------------------------------------------------------------------------ places

struct Edge {
    int32_t first, last, place;  // bytes
};

struct Labelled {
    int32_t first, last, place;  // code points, or parts of them
};

struct LiteralOption {
    int32_t data, length;  // in the bytes of all literals
    int32_t rest;          // a node; NONE: nothing follows
    int64_t after;         // the fewest bytes of what follows
};

enum class PlaceKind : uint8_t { BYTES, TEXT, TRIE, CHARACTER, STATE, TAIL };

struct Place {
    PlaceKind kind = PlaceKind::BYTES;
    bool accepting = false, terminal = false, spelled = false, opened = false;
    int32_t begin = 0, count = 0;  // TEXT: bytes; TRIE: of the members; CHARACTER, TAIL: of the labels
    int32_t depth = 0;             // TRIE: bytes before it; TAIL: bytes ahead; STATE: which
    int32_t owner = 0;             // of a STATE and its remainders: the character automaton; 0: all sets
    int32_t edges = 0, edge_count = 0;
    int32_t rests = 0, rest_count = 0;
    int64_t shortest = 0;
    int64_t plain = 0;  // NONE: Python knows
};

class Places {
  public:
    static constexpr int32_t END = 0;

    explicit Places(const Asking& ask);

    const Place& operator[](int32_t place) const { return places_[place]; }
    std::size_t size() const { return places_.size(); }

    // Valid until the next call that makes edges.
    std::span<const Edge> edges(int32_t place);
    std::span<const int32_t> rests(int32_t place) const {
        return {rests_.data() + places_[place].rests, static_cast<std::size_t>(places_[place].rest_count)};
    }
    int64_t plain(int32_t place);

    int32_t text(const uint8_t* data, int32_t length);
    int32_t trie(const uint8_t* data, std::span<const LiteralOption> options);  // `data` of each within `data`
    int32_t character(std::span<const Labelled> ranges, bool spelled, int64_t shortest, int64_t plain);
    int32_t never(int64_t shortest, int64_t plain);  // nothing leads on, and the leaf does not end

    // A character automaton → its number. shortest: ENDLESS where no end is reached, and no edge leads there.
    // flags: 1 where it accepts, 2 where nothing leads on.
    int32_t states(std::span<const int64_t> shortest, std::span<const uint8_t> flags, bool spelled);
    int32_t state(int32_t owner, int32_t state);
    int32_t begun_state(int32_t owner, int32_t state, int64_t shortest);  // where the leaf may not end at once
    // The answer to CHARACTERS: code points with the state after them.
    void give_characters(std::span<const Labelled> characters) { answer_.assign(characters.begin(), characters.end()); }

  private:
    struct CharacterStates {
        std::vector<int64_t> shortest;
        std::vector<uint8_t> flags;
        std::vector<int32_t> places;
        bool spelled;
    };

    int32_t add(const Place& place);
    int32_t add_state(int32_t owner, int32_t state);
    std::vector<Labelled> state_characters(const Place& place);
    int32_t text_at(int32_t data, int32_t length);
    int32_t trie_at(int32_t begin, int32_t count, int32_t depth);
    int32_t tail(int32_t remaining, const std::vector<Labelled>& values, int32_t owner);
    void open(int32_t place);
    void keep(int32_t place, const std::vector<Edge>& edges);
    std::vector<Edge> trie_edges(const Place& place);
    std::vector<Edge> character_edges(const std::vector<Labelled>& characters, bool spelled, int32_t owner);
    void leading_edges(const std::vector<Labelled>& values, int32_t remaining, int32_t marker, int32_t owner,
                       std::vector<Edge>& edges);
    using Spelling = std::pair<std::string_view, int32_t>;  // with the place after it
    std::vector<Edge> spelling_edges(std::span<const Spelling> spellings, std::size_t depth);

    const Asking& ask_;
    std::vector<Place> places_;
    std::vector<Edge> edges_;
    std::vector<Labelled> labels_;
    std::vector<uint8_t> bytes_;
    std::vector<LiteralOption> options_;
    std::vector<int32_t> members_, rests_;
    VectorMap<int32_t, int32_t> tails_;
    std::vector<CharacterStates> owners_;
    std::vector<Labelled> answer_;
};

// ------------------------------------------------------------------------------------------------ nodes

enum class NodeKind : uint8_t { UNASKED, LEAF, SEQUENCE, OPTIONS, LOOP, NESTED, OPENED, REMAINING };

struct Node {
    NodeKind kind = NodeKind::UNASKED;
    int32_t levels = 0, level_count = 0;
    int32_t parts = 0, part_count = 0;
    int32_t body = NONE;  // LEAF: the place
    int64_t least = 0, most = 0;
    std::vector<int32_t> suffixes;  // SEQUENCE: by level, where the lengths from each part on lie; NONE: not yet
};

class Nodes {
  public:
    explicit Nodes(const Asking& ask) : ask_(ask) {}

    const Node& operator[](int32_t node);
    std::size_t size() const { return nodes_.size(); }
    int32_t part(int32_t node, int32_t index) { return parts_[(*this)[node].parts + index]; }
    int64_t shortest(int32_t node, int32_t depth);
    int64_t shortest_from(int32_t sequence, int32_t index, int32_t depth);
    int32_t body(int32_t node);  // of NESTED, OPENED, REMAINING
    std::vector<int32_t> shortest_parts(int32_t node, int32_t depth);

    void give(int32_t node, NodeKind kind, std::span<const int64_t> levels, std::span<const int64_t> numbers);
    void give_parts(std::span<const int64_t> parts) { answer_.assign(parts.begin(), parts.end()); }

  private:
    const Asking& ask_;
    std::vector<Node> nodes_;
    std::vector<int64_t> levels_, lengths_;
    std::vector<int32_t> parts_, answer_;
};

// ------------------------------------------------------------------------------------------------ frames

using Position = uint64_t;  // place << 32 | frame
inline Position position_of(int32_t place, int32_t frame) {
    return uint64_t(uint32_t(place)) << 32 | uint32_t(frame);
}
inline int32_t place_of(Position position) { return int32_t(position >> 32); }
inline int32_t frame_of(Position position) { return int32_t(uint32_t(position)); }

// Keeps the order in which things first came.
template <typename T>
class Ordered {
  public:
    bool insert(T value) {
        if (items_.size() < FEW) {
            for (T item : items_)
                if (item == value) return false;
        } else {
            if (known_.empty()) known_.insert(items_.begin(), items_.end());
            if (!known_.insert(value).second) return false;
        }
        items_.push_back(value);
        return true;
    }
    const std::vector<T>& items() const { return items_; }
    std::size_t size() const { return items_.size(); }

  private:
    static constexpr std::size_t FEW = 16;
    std::vector<T> items_;
    std::unordered_set<T> known_;
};

struct Closure {
    Ordered<Position> positions;
    bool accepting = false;

    void add(const Closure& other) {
        for (Position position : other.positions.items()) positions.insert(position);
        accepting = accepting || other.accepting;
    }
};

enum class FrameKind : uint8_t { ROOT, REST, AGAIN, RETURN };

struct Frame {
    FrameKind kind;
    int32_t parent, base, room;
    std::vector<int32_t> parents;  // of a RETURN
    int32_t node = NONE, index = 0;
    int64_t least = 0, most = 0, length = -1;
    int32_t closure = NONE, state = NONE;
};

class Frames {
  public:
    static constexpr int32_t ROOT = 0;

    Frames(Places& places, Nodes& nodes, const Limits& limits);

    const Frame& operator[](int32_t frame) const { return frames_[frame]; }
    std::size_t size() const { return frames_.size() + unions_.size(); }
    void set_state(int32_t frame, int32_t state) { frames_[frame].state = state; }

    int32_t rest(int32_t sequence, int32_t index, int32_t parent);
    int32_t again(int32_t loop, int64_t least, int64_t most, int32_t parent);
    int32_t returning(const std::vector<int32_t>& parents);
    int64_t length(int32_t frame);
    const Closure& closure(int32_t frame);
    Closure enter(int32_t node, int32_t frame);
    std::vector<Position> united(const std::vector<Position>& positions);

    int64_t walked = 0;  // nodes and frames that were looked at without taking a byte

  private:
    using Task = uint64_t;  // node << 32 | frame; the node NONE: come back to the frame

    Closure walk(int32_t node, int32_t frame);
    void come_back(int32_t frame, std::vector<Task>& waiting);
    void turn(int32_t loop, int64_t least, int64_t most, int32_t parent, std::vector<Task>& waiting);
    void go_in(int32_t node, int32_t frame, Closure& found, std::vector<Task>& waiting);
    std::vector<int32_t> united_frames(const std::vector<int32_t>& given);
    std::vector<int32_t> joined_calls(const std::vector<int32_t>& given);
    std::vector<int32_t> united_counts(const std::vector<int32_t>& given);
    std::vector<int32_t> above_base(int32_t frame) const;
    int32_t rebuilt(const std::vector<int32_t>& above, int32_t base, std::vector<std::pair<int64_t, int64_t>> intervals);
    int64_t own_length(int32_t frame);

    Places& places_;
    Nodes& nodes_;
    std::vector<Frame> frames_;
    std::deque<Closure> closures_;
    VectorMap<int64_t, int32_t> made_;     // rests and agains
    VectorMap<int32_t, int32_t> returns_;  // by their parents, ascending
    VectorMap<int32_t, std::vector<int32_t>> unions_;
    int64_t work_, ambiguity_;
};

int64_t sum_of(int64_t one, int64_t other);  // of lengths; at most 2 * MOST_LENGTH - 2

// Rewrites frames so that those are equal which texts of at most `reach` bytes cannot tell apart.
class Lookahead {
  public:
    Lookahead(Frames& frames, int64_t reach) : frames_(frames), reach_(reach) {}

    int64_t reach() const { return reach_; }
    void begin(int64_t reach) { reach_ = reach, seen_.clear(); }
    std::vector<Position> of(std::span<const Position> positions);

  private:
    int32_t seen(int32_t frame);

    Frames& frames_;
    int64_t reach_;
    std::unordered_map<int32_t, int32_t> seen_;
};

// Counts the plain characters that may come, from counters.
class PlainText {
  public:
    PlainText(Places& places, Frames& frames) : places_(places), frames_(frames) {}

    int64_t run(std::span<const Position> positions);    // certain to be taken
    int64_t limit(std::span<const Position> positions);  // at most; ENDLESS where that is not certain

  private:
    int64_t run(int32_t place, int32_t frame, int hops);
    int64_t limit(int32_t place, int32_t frame, int hops);
    bool takes_plain(int32_t place);
    bool turns_only(int32_t place, int32_t frame);
    bool turns_alike(int32_t place, int32_t frame);
    Position next_turn(int32_t place, int32_t frame);

    Places& places_;
    Frames& frames_;
};

// Writes shortest texts to the end.
class ShortestText {
  public:
    ShortestText(Places& places, Nodes& nodes, Frames& frames) : places_(places), nodes_(nodes), frames_(frames) {}

    std::vector<uint8_t> from(int32_t place, int32_t frame);

  private:
    void of_node(int32_t node, int32_t room, std::vector<uint8_t>& text);
    void of_copies(int32_t node, int32_t room, int64_t count, std::vector<uint8_t>& text);
    int32_t from_leaf(int32_t place, std::vector<uint8_t>& text);

    Places& places_;
    Nodes& nodes_;
    Frames& frames_;
};

// ------------------------------------------------------------------------------------------------ states

struct Move {
    std::vector<std::pair<int32_t, int32_t>> steps;   // (index of the position that is left, place that is reached)
    std::vector<std::pair<int32_t, int32_t>> ranges;  // (first byte, last byte)
};

struct Split {
    std::vector<Move> moves;
    int16_t numbers[256];  // the move of a byte; -1: dead
    int32_t only_byte = NONE;
};

// What Python reads without a call.
struct View {
    int32_t* table = nullptr;  // [capacity, 256]
    int64_t states = 0, steps = 0, nbytes = 0;
};

class Automaton {
  public:
    Automaton(const Limits& limits, Ask ask, int64_t number);
    ~Automaton();
    Automaton(const Automaton&) = delete;

    Places& places() { return places_; }
    Nodes& nodes() { return nodes_; }
    const View& view();

    int32_t start(int32_t root);
    int32_t step(int32_t state, int32_t byte);
    int32_t run(int32_t state, std::span<const uint8_t> data);
    bool accepting(int32_t state) const { return states_[state].accepting; }
    bool expanded(int32_t state) const { return states_[state].whole; }
    void expand(int32_t state);
    const std::vector<uint8_t>& forced(int32_t state);  // until the next call of it or `close`
    const std::vector<uint8_t>& close(int32_t state);
    int64_t close_length(int32_t state);
    int64_t plain_run(int32_t state);
    int64_t plain_limit(int32_t state);
    int32_t lookahead(int32_t state, int64_t reach);

    const int32_t* row(int32_t state) const { return table_ + int64_t(state) * 256; }  // until a state is made
    const int32_t* table() const { return table_; }
    int64_t steps() const { return targets_ + frames_.walked / WALKED_PER_STEP; }
    int64_t work() const { return steps() + STEPS_PER_QUESTION * ask_.count(); }  // in steps, about

  private:
    static constexpr int64_t WALKED_PER_STEP = 16, STEPS_PER_QUESTION = 8;

    struct State {
        int32_t positions, count;
        int32_t split = NONE;  // NONE: not begun; -2 - b: whole, and only b leads on
        bool accepting, whole = false;
        int32_t lookahead = NONE;
        int64_t length = -1, plain_run = -1;
    };

    int32_t* entries(int32_t state) { return table_ + int64_t(state) * 256; }
    std::span<const Position> positions(int32_t state) const {
        return {positions_.data() + states_[state].positions, static_cast<std::size_t>(states_[state].count)};
    }
    int32_t begin(int32_t state);  // the state's split; its dead bytes are in the row from here on
    int32_t split_of(std::span<const Position> positions);
    int32_t only_byte(int32_t state);
    int32_t take(int32_t state, int32_t split, int32_t move);
    int32_t target(int32_t state, int32_t split, int32_t move);
    int32_t state_after(int32_t frame);
    int32_t state_of(const std::vector<Position>& positions, bool accepting);
    int32_t add_literal(int32_t place, int32_t frame);
    int32_t add(std::span<const Position> positions, bool accepting);
    void grow();

    Limits limits_;
    Asking ask_;
    Places places_;
    Nodes nodes_;
    Frames frames_;
    PlainText plain_;
    ShortestText shortest_;
    Lookahead lookahead_;
    View view_;
    int32_t* table_ = nullptr;
    int64_t capacity_ = 0, targets_ = 0;
    std::vector<State> states_;
    std::vector<Position> positions_;  // of all states
    std::unordered_map<Position, int32_t> alone_;
    VectorMap<uint64_t, int32_t> several_;  // by the positions, ascending, and whether the text may end
    std::vector<Split> splits_;
    VectorMap<int32_t, int32_t> split_numbers_;  // by places
    std::vector<int32_t> split_of_place_;
    std::vector<uint8_t> text_;
};

// Runs a call for Python; an answer below -2 is a Failure.
template <typename Call>
int64_t answer(Automaton* automaton, Call call) {
    int64_t found;
    try {
        found = call(*automaton);
    } catch (Failure failure) {
        found = static_cast<int64_t>(failure);
    } catch (const std::bad_alloc&) {
        found = static_cast<int64_t>(Failure::MEMORY);
    }
    automaton->view();
    return found;
}

}  // namespace umbel
