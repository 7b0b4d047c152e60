// States: sets of positions, their rows in the table of transitions, and what Python calls.
#include "automaton.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace umbel {
namespace {

constexpr int64_t FIRST_ROWS = 32, DOUBLED_ROWS = 4'096, LITERAL_BYTES = 8, ROW_BYTES = 1'024;
constexpr int64_t MAP_BYTES = 48;  // of an entry beside its key and value, about

bool is_literal(const Place& place) { return place.kind == PlaceKind::TEXT || place.kind == PlaceKind::TRIE; }

}  // namespace

Automaton::Automaton(const Limits& limits, Ask ask, int64_t number)
    : limits_(limits),
      ask_(ask, number),
      places_(ask_),
      nodes_(ask_),
      frames_(places_, nodes_, limits),
      plain_(places_, frames_),
      shortest_(places_, nodes_, frames_),
      lookahead_(frames_, 0) {
    grow();
}

Automaton::~Automaton() { std::free(table_); }

void Automaton::grow() {
    const auto states = int64_t(states_.size());
    const int64_t doubled = states < FIRST_ROWS ? FIRST_ROWS : states < DOUBLED_ROWS ? 2 * states : limits_.states;
    capacity_ = std::min(doubled, limits_.states);
    // Of rows that are beyond the states nothing is touched: they take no memory yet.
    auto* grown = static_cast<int32_t*>(std::realloc(table_, capacity_ * ROW_BYTES));
    if (!grown) throw std::bad_alloc();
    table_ = grown;
}

const View& Automaton::view() {
    view_.table = table_;
    view_.states = int64_t(states_.size());
    view_.steps = steps();
    const auto states = int64_t(states_.size() * (ROW_BYTES + sizeof(State) + 2 * sizeof(Position) + MAP_BYTES));
    const auto held = int64_t(2 * positions_.size() * sizeof(Position));
    const auto frames = int64_t(frames_.size() * (sizeof(Frame) + sizeof(Closure) + 32 + MAP_BYTES));
    const auto splits = int64_t(splits_.size() * (sizeof(Split) + 8 * sizeof(Move) + MAP_BYTES));
    const auto others = int64_t(places_.size() * (sizeof(Place) + 2 * sizeof(Edge)) + nodes_.size() * sizeof(Node));
    view_.nbytes = int64_t(sizeof(Automaton)) + states + held + frames + splits + others;
    return view_;
}

int32_t Automaton::start(int32_t root) {
    const Closure closure = frames_.enter(root, Frames::ROOT);
    return state_of(closure.positions.items(), closure.accepting);
}

int32_t Automaton::step(int32_t state, int32_t byte) {
    if (state < 0) return DEAD;
    const int32_t following = row(state)[byte];
    if (following != UNKNOWN) return following;
    const int32_t split = begin(state), move = splits_[split].numbers[byte];
    return move < 0 ? DEAD : take(state, split, move);
}

int32_t Automaton::run(int32_t state, std::span<const uint8_t> data) {
    for (uint8_t byte : data) {
        if (state < 0) return DEAD;
        state = step(state, byte);
    }
    return state;
}

void Automaton::expand(int32_t state) {
    if (states_[state].whole) return;
    const int32_t split = begin(state);
    for (int32_t move = 0; move < int32_t(splits_[split].moves.size()); move++)
        if (row(state)[splits_[split].moves[move].ranges[0].first] == UNKNOWN) take(state, split, move);
    states_[state].whole = true;
}

int32_t Automaton::only_byte(int32_t state) {
    const int32_t split = states_[state].split;
    return split <= -2 ? -2 - split : splits_[begin(state)].only_byte;
}

const std::vector<uint8_t>& Automaton::forced(int32_t state) {
    text_.clear();
    while (!states_[state].accepting && int64_t(text_.size()) < limits_.forced_bytes) {
        const int32_t byte = only_byte(state);
        if (byte < 0) break;
        text_.push_back(uint8_t(byte));
        state = step(state, byte);
    }
    return text_;
}

const std::vector<uint8_t>& Automaton::close(int32_t state) {
    text_.clear();
    if (states_[state].accepting) return text_;
    int64_t least = -1;
    Position chosen = 0;
    const std::vector<Position> given(positions(state).begin(), positions(state).end());
    for (Position position : given) {
        const int64_t length = sum_of(places_[place_of(position)].shortest, frames_.length(frame_of(position)));
        if (least < 0 || length < least) least = length, chosen = position;
    }
    text_ = shortest_.from(place_of(chosen), frame_of(chosen));
    return text_;
}

int64_t Automaton::close_length(int32_t state) {
    if (states_[state].length < 0) {
        int64_t least = states_[state].accepting ? 0 : -1;
        if (least < 0)
            for (Position position : positions(state)) {
                const int64_t length = sum_of(places_[place_of(position)].shortest, frames_.length(frame_of(position)));
                if (least < 0 || length < least) least = length;
            }
        states_[state].length = least;
    }
    return states_[state].length;
}

int64_t Automaton::plain_run(int32_t state) {
    if (states_[state].plain_run < 0) {
        const int64_t run = plain_.run(positions(state));
        states_[state].plain_run = run;
    }
    return states_[state].plain_run;
}

int64_t Automaton::plain_limit(int32_t state) { return plain_.limit(positions(state)); }

int32_t Automaton::lookahead(int32_t state, int64_t reach) {
    if (lookahead_.reach() != reach) {
        lookahead_.begin(reach);
        for (State& known : states_) known.lookahead = NONE;
    }
    if (states_[state].lookahead == NONE) {
        const int32_t seen = state_of(lookahead_.of(positions(state)), states_[state].accepting);
        states_[state].lookahead = seen;
    }
    return states_[state].lookahead;
}

// ------------------------------------------------------------------------------------------------ transitions

int32_t Automaton::begin(int32_t state) {
    if (states_[state].split == NONE) {
        const int32_t split = split_of(positions(state));
        states_[state].split = split;
        int32_t* const row = entries(state);
        for (int byte = 0; byte < 256; byte++) row[byte] = splits_[split].numbers[byte] < 0 ? DEAD : UNKNOWN;
    }
    return states_[state].split;
}

// Sweeps from byte to byte where an edge begins or ends, with the places that have an edge there.
int32_t Automaton::split_of(std::span<const Position> positions) {
    std::vector<int32_t> places;
    for (Position position : positions) places.push_back(place_of(position));
    const bool alone = places.size() == 1;
    if (alone && places[0] < int32_t(split_of_place_.size()) && split_of_place_[places[0]] != NONE)
        return split_of_place_[places[0]];
    if (!alone)
        if (const auto known = split_numbers_.find(places); known != split_numbers_.end()) return known->second;

    struct Bound {
        int32_t byte, index, place;  // NONE: the edge of this index is over
    };
    std::vector<Bound> bounds;
    for (std::size_t index = 0; index < places.size(); index++)
        for (const Edge& edge : places_.edges(places[index])) {
            bounds.push_back({edge.first, int32_t(index), edge.place});
            bounds.push_back({edge.last + 1, int32_t(index), NONE});
        }
    std::sort(bounds.begin(), bounds.end(), [](const Bound& a, const Bound& b) {
        return a.byte != b.byte ? a.byte < b.byte : (a.place == NONE) > (b.place == NONE);
    });
    Split split;
    std::fill(split.numbers, split.numbers + 256, int16_t(-1));
    std::vector<int32_t> active(places.size(), NONE);
    VectorMap<int32_t, int32_t> numbers;
    int32_t parts = 0;
    for (std::size_t i = 0; i < bounds.size();) {
        const int32_t byte = bounds[i].byte;
        for (; i < bounds.size() && bounds[i].byte == byte; i++) active[bounds[i].index] = bounds[i].place;
        if (i == bounds.size()) break;
        const int32_t last = bounds[i].byte - 1;
        std::vector<int32_t> steps;
        for (std::size_t index = 0; index < active.size(); index++)
            if (active[index] != NONE) steps.insert(steps.end(), {int32_t(index), active[index]});
        if (steps.empty()) continue;
        const auto [known, fresh] = numbers.try_emplace(steps, int32_t(split.moves.size()));
        if (fresh) {
            split.moves.emplace_back();
            for (std::size_t step = 0; step < steps.size(); step += 2)
                split.moves.back().steps.emplace_back(steps[step], steps[step + 1]);
        }
        split.moves[known->second].ranges.emplace_back(byte, last);
        std::fill(split.numbers + byte, split.numbers + last + 1, int16_t(known->second));
        split.only_byte = ++parts == 1 && byte == last ? byte : NONE;
    }
    const auto number = int32_t(splits_.size());
    splits_.push_back(std::move(split));
    if (alone) {
        if (places[0] >= int32_t(split_of_place_.size())) split_of_place_.resize(places_.size(), NONE);
        split_of_place_[places[0]] = number;
    } else {
        split_numbers_.emplace(std::move(places), number);
    }
    return number;
}

int32_t Automaton::take(int32_t state, int32_t split, int32_t move) {
    const int32_t found = target(state, split, move);
    int32_t* const row = entries(state);  // after the target: the table may lie elsewhere now
    const Move& taken = splits_[split].moves[move];
    for (const auto& [first, last] : taken.ranges) std::fill(row + first, row + last + 1, found);
    targets_ += int64_t(taken.steps.size());
    return found;
}

int32_t Automaton::target(int32_t state, int32_t split, int32_t move) {
    const std::vector<std::pair<int32_t, int32_t>> steps = splits_[split].moves[move].steps;
    if (steps.size() == 1 && !places_[steps[0].second].rest_count) {
        const auto [index, number] = steps[0];
        const int32_t frame = frame_of(positions(state)[index]);
        const Place& place = places_[number];
        if (place.accepting && place.terminal) return state_after(frame);
        if (!place.accepting) {
            const auto known = alone_.find(position_of(number, frame));
            return known == alone_.end() ? add_literal(number, frame) : known->second;
        }
    }
    Closure found;
    for (const auto& [index, place] : steps) {
        const int32_t frame = frame_of(positions(state)[index]);
        if (!places_[place].terminal) found.positions.insert(position_of(place, frame));
        const std::vector<int32_t> rests(places_.rests(place).begin(), places_.rests(place).end());
        for (int32_t rest : rests) found.add(frames_.enter(rest, frame));
        if (places_[place].accepting) found.add(frames_.closure(frame));
    }
    return state_of(found.positions.items(), found.accepting);
}

int32_t Automaton::state_after(int32_t frame) {
    if (frames_[frame].state < 0) {
        const Closure& closure = frames_.closure(frame);
        frames_.set_state(frame, state_of(closure.positions.items(), closure.accepting));
    }
    return frames_[frame].state;
}

int32_t Automaton::state_of(const std::vector<Position>& given, bool accepting) {
    const std::vector<Position> positions = given.size() > 1 ? frames_.united(given) : given;
    if (positions.size() == 1 && !accepting) {
        const auto known = alone_.find(positions[0]);
        if (known != alone_.end()) return known->second;
    } else {
        std::vector<uint64_t> key = positions;
        std::sort(key.begin(), key.end());
        key.push_back(accepting);
        const auto known = several_.find(key);
        if (known != several_.end()) return known->second;
    }
    return add(positions, accepting);
}

// Adds the state of one position, and those after it as far as a literal leads: its bytes come soon.
int32_t Automaton::add_literal(int32_t place, int32_t frame) {
    const Position position = position_of(place, frame);
    const int32_t first = add({&position, 1}, false);
    int64_t left = std::min(LITERAL_BYTES, limits_.states - first - 1);
    for (int32_t state = first; left > 0 && is_literal(places_[place]); left--) {
        const std::span<const Edge> edges = places_.edges(place);
        if (edges.size() != 1) break;
        const int32_t byte = edges[0].first;
        place = edges[0].place;
        const Position next = position_of(place, frame);
        if (places_[place].accepting || places_[place].rest_count || alone_.contains(next)) break;
        const int32_t following = add({&next, 1}, false);
        int32_t* const row = entries(state);
        std::fill(row, row + 256, DEAD);
        row[byte] = following;
        states_[state].split = -2 - byte;
        states_[state].whole = true;
        targets_++;
        state = following;
    }
    return first;
}

int32_t Automaton::add(std::span<const Position> positions, bool accepting) {
    const auto number = int32_t(states_.size());
    if (int64_t(positions.size()) > limits_.ambiguity) throw Failure::AMBIGUITY;
    if (number >= limits_.states) throw Failure::STATES;
    if (number == capacity_) grow();
    std::fill(entries(number), entries(number) + 256, UNKNOWN);
    State state{};
    state.positions = int32_t(positions_.size());
    state.count = int32_t(positions.size());
    state.accepting = accepting;
    positions_.insert(positions_.end(), positions.begin(), positions.end());
    states_.push_back(state);
    if (positions.size() == 1 && !accepting) {
        alone_.emplace(positions[0], number);
    } else {
        std::vector<uint64_t> key(positions.begin(), positions.end());
        std::sort(key.begin(), key.end());
        key.push_back(accepting);
        several_.emplace(std::move(key), number);
    }
    return number;
}

}  // namespace umbel

// ------------------------------------------------------------------------------------------------ for Python

namespace {

using umbel::answer;
using umbel::Automaton;


}  // namespace

extern "C" {

Automaton* umbel_automaton(int64_t states, int64_t depth, int64_t ambiguity, int64_t forced_bytes, umbel::Ask ask,
                           int64_t number) {
    return new Automaton({states, depth, ambiguity, forced_bytes}, ask, number);
}

void umbel_automaton_free(Automaton* automaton) { delete automaton; }

const umbel::View* umbel_automaton_view(Automaton* automaton) { return &automaton->view(); }

// numbers: [levels] and what belongs to the kind: parts; the body, or place; the body, least, most.
void umbel_automaton_node(Automaton* automaton, int32_t node, int32_t kind, const int64_t* numbers, long levels,
                          long count) {
    automaton->nodes().give(node, static_cast<umbel::NodeKind>(kind), {numbers, std::size_t(levels)},
                            {numbers + levels, std::size_t(count - levels)});
}

void umbel_automaton_parts(Automaton* automaton, const int64_t* parts, long count) {
    automaton->nodes().give_parts({parts, std::size_t(count)});
}

int32_t umbel_automaton_text(Automaton* automaton, const uint8_t* data, long length) {
    return automaton->places().text(data, int32_t(length));
}

// options: [count, 3] length, rest, fewest bytes after; `data` has the bytes of all, one after the other.
int32_t umbel_automaton_trie(Automaton* automaton, const uint8_t* data, const int64_t* options, long count) {
    std::vector<umbel::LiteralOption> given;
    int32_t begin = 0;
    for (long i = 0; i < count; i++) {
        const int64_t* const option = options + 3 * i;
        given.push_back({begin, int32_t(option[0]), int32_t(option[1]), option[2]});
        begin += int32_t(option[0]);
    }
    return automaton->places().trie(data, given);
}

// ranges: [count, 2] the first and last code points of a set of characters.
int32_t umbel_automaton_character(Automaton* automaton, const int32_t* ranges, long count, int32_t spelled,
                                  int64_t shortest, int64_t plain) {
    std::vector<umbel::Labelled> given;
    for (long i = 0; i < count; i++) given.push_back({ranges[2 * i], ranges[2 * i + 1], umbel::Places::END});
    return automaton->places().character(given, spelled, shortest, plain);
}

int32_t umbel_automaton_never(Automaton* automaton, int64_t shortest, int64_t plain) {
    return automaton->places().never(shortest, plain);
}

int32_t umbel_automaton_states(Automaton* automaton, const int64_t* shortest, const uint8_t* flags, long count,
                               int32_t spelled) {
    return automaton->places().states({shortest, std::size_t(count)}, {flags, std::size_t(count)}, spelled);
}

int32_t umbel_automaton_state(Automaton* automaton, int32_t owner, int32_t state) {
    return automaton->places().state(owner, state);
}

int32_t umbel_automaton_begun_state(Automaton* automaton, int32_t owner, int32_t state, int64_t shortest) {
    return automaton->places().begun_state(owner, state, shortest);
}

// characters: [count, 3] the first and last code point, and the state after it.
void umbel_automaton_characters(Automaton* automaton, const int32_t* characters, long count) {
    automaton->places().give_characters(
        {reinterpret_cast<const umbel::Labelled*>(characters), std::size_t(count)});
}

int64_t umbel_automaton_start(Automaton* automaton, int32_t root) {
    return answer(automaton, [&](Automaton& own) { return own.start(root); });
}

int64_t umbel_automaton_step(Automaton* automaton, int32_t state, int32_t byte) {
    return answer(automaton, [&](Automaton& own) { return own.step(state, byte); });
}

int64_t umbel_automaton_run(Automaton* automaton, int32_t state, const uint8_t* data, long length) {
    return answer(automaton, [&](Automaton& own) { return own.run(state, {data, std::size_t(length)}); });
}

int64_t umbel_automaton_accepting(Automaton* automaton, int32_t state) { return automaton->accepting(state); }

int64_t umbel_automaton_expanded(Automaton* automaton, int32_t state) { return automaton->expanded(state); }

int64_t umbel_automaton_expand(Automaton* automaton, int32_t state) {
    return answer(automaton, [&](Automaton& own) { return own.expand(state), 0; });
}

// → the length of `*text`, which is valid until the next call of this or of `umbel_automaton_close`.
int64_t umbel_automaton_forced(Automaton* automaton, int32_t state, const uint8_t** text) {
    return answer(automaton, [&](Automaton& own) {
        const std::vector<uint8_t>& found = own.forced(state);
        *text = found.data();
        return int64_t(found.size());
    });
}

int64_t umbel_automaton_close(Automaton* automaton, int32_t state, const uint8_t** text) {
    return answer(automaton, [&](Automaton& own) {
        const std::vector<uint8_t>& found = own.close(state);
        *text = found.data();
        return int64_t(found.size());
    });
}

int64_t umbel_automaton_close_length(Automaton* automaton, int32_t state) {
    return answer(automaton, [&](Automaton& own) { return own.close_length(state); });
}

int64_t umbel_automaton_plain_run(Automaton* automaton, int32_t state) {
    return answer(automaton, [&](Automaton& own) { return own.plain_run(state); });
}

int64_t umbel_automaton_plain_limit(Automaton* automaton, int32_t state) {
    return answer(automaton, [&](Automaton& own) { return own.plain_limit(state); });
}

int64_t umbel_automaton_lookahead(Automaton* automaton, int32_t state, int64_t reach) {
    return answer(automaton, [&](Automaton& own) { return own.lookahead(state, reach); });
}

}  // extern "C"
