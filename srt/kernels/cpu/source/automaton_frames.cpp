// Nodes and frames: what is left to match, and where a text stands without a further byte.
#include <algorithm>
#include <limits>
#include <string_view>

#include "automaton.h"

namespace umbel {

namespace {

int64_t one_less(int64_t turns) { return turns == 0 || turns == ENDLESS ? turns : turns - 1; }

int64_t product_of(int64_t one, int64_t other) {
    const auto product = static_cast<__int128>(one) * other;
    return product > MOST_LENGTH ? MOST_LENGTH : static_cast<int64_t>(product);
}

}  // namespace

int64_t sum_of(int64_t one, int64_t other) { return std::min(one, MOST_LENGTH - 1) + std::min(other, MOST_LENGTH - 1); }

// ------------------------------------------------------------------------------------------------ nodes

const Node& Nodes::operator[](int32_t node) {
    if (node >= int32_t(nodes_.size()) || nodes_[node].kind == NodeKind::UNASKED) ask_(Question::NODE, node);
    return nodes_[node];
}

void Nodes::give(int32_t node, NodeKind kind, std::span<const int64_t> levels, std::span<const int64_t> numbers) {
    if (node >= int32_t(nodes_.size())) nodes_.resize(node + 1);
    Node& given = nodes_[node];
    given.kind = kind;
    given.levels = int32_t(levels_.size());
    given.level_count = int32_t(levels.size());
    levels_.insert(levels_.end(), levels.begin(), levels.end());
    if (kind == NodeKind::SEQUENCE || kind == NodeKind::OPTIONS) {
        given.parts = int32_t(parts_.size());
        given.part_count = int32_t(numbers.size());
        parts_.insert(parts_.end(), numbers.begin(), numbers.end());
    } else if (!numbers.empty()) {
        given.body = int32_t(numbers[0]);
    }
    if (kind == NodeKind::LOOP) {
        given.least = numbers[1];
        given.most = numbers[2];
    }
}

int64_t Nodes::shortest(int32_t node, int32_t depth) {
    const Node& known = (*this)[node];
    return levels_[known.levels + std::min(depth, known.level_count - 1)];
}

int64_t Nodes::shortest_from(int32_t sequence, int32_t index, int32_t depth) {
    const int32_t level = std::min(depth, (*this)[sequence].level_count - 1);
    if (nodes_[sequence].suffixes.empty())
        nodes_[sequence].suffixes.assign(nodes_[sequence].level_count, NONE);
    if (nodes_[sequence].suffixes[level] == NONE) {
        const int32_t count = nodes_[sequence].part_count;
        std::vector<int64_t> lengths(count + 1, 0);
        for (int32_t i = count - 1; i >= 0; i--)
            lengths[i] = sum_of(lengths[i + 1], shortest(part(sequence, i), level));
        nodes_[sequence].suffixes[level] = int32_t(lengths_.size());
        lengths_.insert(lengths_.end(), lengths.begin(), lengths.end());
    }
    return lengths_[nodes_[sequence].suffixes[level] + index];
}

int32_t Nodes::body(int32_t node) {
    if ((*this)[node].body == NONE) {
        const auto body = int32_t(ask_(Question::BODY, node));
        nodes_[node].body = body;
    }
    return nodes_[node].body;
}

std::vector<int32_t> Nodes::shortest_parts(int32_t node, int32_t depth) {
    ask_(Question::SHORTEST_PARTS, node, depth);
    return answer_;
}

// ------------------------------------------------------------------------------------------------ frames

Frames::Frames(Places& places, Nodes& nodes, const Limits& limits)
    : places_(places), nodes_(nodes), work_(64 * limits.ambiguity), ambiguity_(limits.ambiguity) {
    Frame root{FrameKind::ROOT, NONE, ROOT, int32_t(limits.depth), {}};
    root.length = 0;
    frames_.push_back(root);
}

int32_t Frames::rest(int32_t sequence, int32_t index, int32_t parent) {
    if (index == nodes_[sequence].part_count) return parent;
    const auto [known, fresh] = made_.try_emplace({sequence, index, parent}, int32_t(frames_.size()));
    if (fresh) {
        Frame frame{FrameKind::REST, parent, frames_[parent].base, frames_[parent].room, {}};
        frame.node = sequence;
        frame.index = index;
        frames_.push_back(std::move(frame));
    }
    return known->second;
}

int32_t Frames::again(int32_t loop, int64_t least, int64_t most, int32_t parent) {
    if (most == 0) return parent;
    const auto [known, fresh] = made_.try_emplace({loop, least, most, parent}, int32_t(frames_.size()));
    if (fresh) {
        Frame frame{FrameKind::AGAIN, parent, frames_[parent].base, frames_[parent].room, {}};
        frame.node = loop;
        frame.least = least;
        frame.most = most;
        frames_.push_back(std::move(frame));
    }
    return known->second;
}

int32_t Frames::returning(const std::vector<int32_t>& parents) {
    std::vector<int32_t> key = parents;
    std::sort(key.begin(), key.end());
    const auto known = returns_.find(key);
    if (known != returns_.end()) return known->second;
    const auto number = int32_t(frames_.size());
    Frame frame{FrameKind::RETURN, NONE, number, frames_[parents[0]].room - 1, parents};
    frame.length = MOST_LENGTH;
    for (int32_t parent : parents) frame.length = std::min(frame.length, length(parent));
    frames_.push_back(std::move(frame));
    returns_.emplace(std::move(key), number);
    return number;
}

int64_t Frames::own_length(int32_t frame) {
    const Frame& own = frames_[frame];
    if (own.kind == FrameKind::REST) return nodes_.shortest_from(own.node, own.index, own.room);
    if (own.kind == FrameKind::AGAIN && own.least)
        return product_of(own.least, nodes_.shortest(nodes_[own.node].body, own.room));
    return 0;
}

int64_t Frames::length(int32_t frame) {
    std::vector<int32_t> above;
    for (; frames_[frame].length < 0; frame = frames_[frame].parent) above.push_back(frame);
    int64_t total = frames_[frame].length;
    for (; !above.empty(); above.pop_back()) {
        total = std::min(sum_of(total, own_length(above.back())), MOST_LENGTH);
        frames_[above.back()].length = total;
    }
    return total;
}

const Closure& Frames::closure(int32_t frame) {
    if (frames_[frame].closure == NONE) {
        closures_.push_back(walk(NONE, frame));
        frames_[frame].closure = int32_t(closures_.size()) - 1;
    }
    return closures_[frames_[frame].closure];
}

Closure Frames::enter(int32_t node, int32_t frame) {
    int32_t start = node, above = frame;
    while (nodes_.shortest(start, frames_[above].room) < ENDLESS) {
        const NodeKind kind = nodes_[start].kind;
        if (kind == NodeKind::SEQUENCE) {
            above = rest(start, 1, above);
            start = nodes_.part(start, 0);
        } else if (kind == NodeKind::OPENED || kind == NodeKind::REMAINING) {
            start = nodes_.body(start);
        } else if (kind == NodeKind::LEAF) {
            const Place& place = places_[nodes_[start].body];
            if (place.accepting || place.rest_count || place.terminal) break;
            Closure found;
            found.positions.insert(position_of(nodes_[start].body, above));
            return found;
        } else {
            break;
        }
    }
    return walk(node, frame);
}

Closure Frames::walk(int32_t start, int32_t above) {
    Closure found;
    std::vector<Task> waiting{position_of(start, above)};
    Ordered<Task> seen;
    while (!waiting.empty()) {
        const Task task = waiting.back();
        waiting.pop_back();
        if (!seen.insert(task)) continue;
        const int32_t node = place_of(task), frame = frame_of(task);
        if (node == NONE) {
            if (frames_[frame].closure != NONE)
                found.add(closures_[frames_[frame].closure]);
            else if (frames_[frame].kind == FrameKind::ROOT)
                found.accepting = true;
            else
                come_back(frame, waiting);
        } else if (nodes_.shortest(node, frames_[frame].room) < ENDLESS) {
            go_in(node, frame, found, waiting);
        }
        if (int64_t(seen.size()) > work_ || int64_t(found.positions.size()) > ambiguity_) throw Failure::AMBIGUITY;
    }
    walked += int64_t(seen.size());
    return found;
}

void Frames::come_back(int32_t number, std::vector<Task>& waiting) {
    const Frame frame = frames_[number];
    if (frame.kind == FrameKind::REST) {
        const int32_t after = rest(frame.node, frame.index + 1, frame.parent);
        waiting.push_back(position_of(nodes_.part(frame.node, frame.index), after));
    } else if (frame.kind == FrameKind::AGAIN) {
        turn(frame.node, frame.least, frame.most, frame.parent, waiting);
    } else {
        for (auto parent = frame.parents.rbegin(); parent != frame.parents.rend(); ++parent)
            waiting.push_back(position_of(NONE, *parent));
    }
}

void Frames::turn(int32_t loop, int64_t least, int64_t most, int32_t parent, std::vector<Task>& waiting) {
    if (least == 0) waiting.push_back(position_of(NONE, parent));
    const int32_t after = again(loop, one_less(least), one_less(most), parent);
    waiting.push_back(position_of(nodes_[loop].body, after));
}

void Frames::go_in(int32_t number, int32_t frame, Closure& found, std::vector<Task>& waiting) {
    const NodeKind kind = nodes_[number].kind;
    switch (kind) {
        case NodeKind::LEAF: {
            const int32_t place = nodes_[number].body;
            if (!places_[place].terminal) found.positions.insert(position_of(place, frame));
            const std::span<const int32_t> rests = places_.rests(place);
            for (auto rest = rests.rbegin(); rest != rests.rend(); ++rest) waiting.push_back(position_of(*rest, frame));
            if (places_[place].accepting) waiting.push_back(position_of(NONE, frame));
            break;
        }
        case NodeKind::SEQUENCE:
            waiting.push_back(position_of(nodes_.part(number, 0), rest(number, 1, frame)));
            break;
        case NodeKind::OPTIONS:
            for (int32_t i = nodes_[number].part_count - 1; i >= 0; i--)
                waiting.push_back(position_of(nodes_.part(number, i), frame));
            break;
        case NodeKind::LOOP:
            turn(number, nodes_[number].least, nodes_[number].most, frame, waiting);
            break;
        case NodeKind::OPENED:
        case NodeKind::REMAINING:
            waiting.push_back(position_of(nodes_.body(number), frame));
            break;
        case NodeKind::NESTED:
            waiting.push_back(position_of(nodes_.body(number),
                                          frames_[frame].kind == FrameKind::RETURN ? frame : returning({frame})));
            break;
        case NodeKind::UNASKED:
            break;
    }
}

// ------------------------------------------------------------------------------------------------ united positions

namespace {

constexpr std::size_t MOST_COMPARED = 64;

using Interval = std::pair<int64_t, int64_t>;
using Intervals = std::vector<Interval>;

// Groups in the order in which their keys first came.
template <typename Key, typename Item>
class Groups {
  public:
    void add(const Key& key, const Item& item) {
        const auto [known, fresh] = numbers_.try_emplace(key, groups_.size());
        if (fresh) groups_.emplace_back();
        groups_[known->second].push_back(item);
    }
    const std::vector<std::vector<Item>>& groups() const { return groups_; }

  private:
    VectorMap<typename Key::value_type, std::size_t> numbers_;
    std::vector<std::vector<Item>> groups_;
};

std::vector<int64_t> numbers_of(const Intervals& intervals, std::size_t without) {
    std::vector<int64_t> numbers;
    for (std::size_t i = 0; i < intervals.size(); i++)
        if (i != without) numbers.insert(numbers.end(), {intervals[i].first, intervals[i].second});
    return numbers;
}

void keep_one(std::vector<Intervals>& vectors) {
    std::vector<Intervals> found;
    VectorMap<int64_t, bool> known;
    for (Intervals& vector : vectors)
        if (known.try_emplace(numbers_of(vector, vector.size()), true).second) found.push_back(std::move(vector));
    vectors = std::move(found);
}

// Unites vectors that agree but for one axis, where their intervals overlap or touch.
std::vector<Intervals> united_along(const std::vector<Intervals>& vectors, std::size_t axis) {
    Groups<std::vector<int64_t>, Intervals> lines;
    for (const Intervals& vector : vectors) lines.add(numbers_of(vector, axis), vector);
    std::vector<Intervals> united;
    for (const std::vector<Intervals>& line : lines.groups()) {
        std::vector<Interval> intervals;
        for (const Intervals& vector : line) intervals.push_back(vector[axis]);
        std::sort(intervals.begin(), intervals.end());
        Intervals made = line[0];
        made[axis] = intervals[0];
        for (std::size_t i = 1; i < intervals.size(); i++) {
            if (intervals[i].first <= made[axis].second + 1) {
                made[axis].second = std::max(made[axis].second, intervals[i].second);
            } else {
                united.push_back(made);
                made[axis] = intervals[i];
            }
        }
        united.push_back(made);
    }
    keep_one(united);
    return united;
}

bool includes(const Intervals& one, const Intervals& other) {
    for (std::size_t i = 0; i < one.size(); i++)
        if (other[i].first < one[i].first || other[i].second > one[i].second) return false;
    return true;
}

// The vectors that no other one includes.
std::vector<Intervals> maximal(std::vector<Intervals> vectors) {
    if (vectors.size() > MOST_COMPARED) return vectors;
    std::vector<Intervals> found;
    for (const Intervals& vector : vectors)
        if (std::none_of(vectors.begin(), vectors.end(),
                         [&](const Intervals& other) { return other != vector && includes(other, vector); }))
            found.push_back(vector);
    return found;
}

}  // namespace

std::vector<Position> Frames::united(const std::vector<Position>& positions) {
    Groups<std::vector<int32_t>, int32_t> groups;
    std::vector<int32_t> places;
    for (Position position : positions) {
        groups.add({place_of(position)}, frame_of(position));
        if (groups.groups().size() > places.size()) places.push_back(place_of(position));
    }
    if (places.size() == positions.size()) return positions;
    std::vector<Position> found;
    for (std::size_t i = 0; i < places.size(); i++) {
        const std::vector<int32_t>& alike = groups.groups()[i];
        for (int32_t frame : alike.size() > 1 ? united_frames(alike) : alike)
            found.push_back(position_of(places[i], frame));
    }
    return found;
}

std::vector<int32_t> Frames::united_frames(const std::vector<int32_t>& given) {
    const auto known = unions_.find(given);
    if (known != unions_.end()) return known->second;
    std::vector<int32_t> found = united_counts(joined_calls(given));
    unions_.emplace(given, found);
    return found;
}

std::vector<int32_t> Frames::above_base(int32_t frame) const {
    std::vector<int32_t> above;
    for (; frame != frames_[frame].base; frame = frames_[frame].parent) above.push_back(frame);
    return above;
}

// Frames that are equal down to the call that they are in, in one call with the parents of all.
std::vector<int32_t> Frames::joined_calls(const std::vector<int32_t>& given) {
    Groups<std::vector<int64_t>, int32_t> groups;
    for (int32_t number : given) {
        const int32_t base = frames_[number].base;
        std::vector<int64_t> key{frames_[number].room, frames_[base].kind == FrameKind::RETURN};
        for (int32_t above : above_base(number)) {
            const Frame& frame = frames_[above];
            if (frame.kind == FrameKind::AGAIN)
                key.insert(key.end(), {frame.node, frame.least, frame.most});
            else
                key.insert(key.end(), {frame.node, frame.index});
        }
        groups.add(key, number);
    }
    std::vector<int32_t> found;
    for (const std::vector<int32_t>& alike : groups.groups()) {
        if (alike.size() == 1) {
            found.push_back(alike[0]);
            continue;
        }
        Ordered<int32_t> parents;
        for (int32_t number : alike) {
            const Frame& base = frames_[frames_[number].base];
            if (base.kind == FrameKind::RETURN)
                for (int32_t parent : base.parents) parents.insert(parent);
        }
        const int32_t base = returning(united_frames(parents.items()));
        found.push_back(rebuilt(above_base(alike[0]), base, {}));
    }
    return found;
}

// Frames that differ in counts only, with intervals that include those of several.
std::vector<int32_t> Frames::united_counts(const std::vector<int32_t>& given) {
    Groups<std::vector<int64_t>, int32_t> groups;
    for (int32_t number : given) {
        std::vector<int64_t> key{frames_[number].base};
        for (int32_t above : above_base(number)) {
            const Frame& frame = frames_[above];
            key.insert(key.end(), {frame.node, frame.kind == FrameKind::AGAIN ? NONE : frame.index});
        }
        groups.add(key, number);
    }
    std::vector<int32_t> found;
    for (const std::vector<int32_t>& alike : groups.groups()) {
        if (alike.size() == 1) {
            found.push_back(alike[0]);
            continue;
        }
        std::vector<Intervals> vectors;
        for (int32_t number : alike) {
            Intervals intervals;
            for (int32_t above : above_base(number))
                if (frames_[above].kind == FrameKind::AGAIN)
                    intervals.emplace_back(frames_[above].least, frames_[above].most);
            vectors.push_back(std::move(intervals));
        }
        keep_one(vectors);
        for (std::size_t count = vectors.size() + 1; vectors.size() < count;) {
            count = vectors.size();
            for (std::size_t axis = 0; axis < vectors[0].size(); axis++) vectors = united_along(vectors, axis);
        }
        const std::vector<int32_t> above = above_base(alike[0]);
        const int32_t base = frames_[alike[0]].base;
        for (const Intervals& vector : maximal(std::move(vectors))) found.push_back(rebuilt(above, base, vector));
    }
    return found;
}

// The frames of `above` on another base; with other counts, the innermost first, where some are given.
int32_t Frames::rebuilt(const std::vector<int32_t>& above, int32_t base, Intervals intervals) {
    int32_t built = base;
    for (auto number = above.rbegin(); number != above.rend(); ++number) {
        const Frame& frame = frames_[*number];
        if (frame.kind == FrameKind::REST) {
            built = rest(frame.node, frame.index, built);
        } else if (intervals.empty()) {
            built = again(frame.node, frame.least, frame.most, built);
        } else {
            const Interval counts = intervals.back();
            intervals.pop_back();
            built = again(frame.node, counts.first, counts.second, built);
        }
    }
    return built;
}

// ------------------------------------------------------------------------------------------------ lookahead

std::vector<Position> Lookahead::of(std::span<const Position> positions) {
    Ordered<Position> found;
    for (Position position : positions) found.insert(position_of(place_of(position), seen(frame_of(position))));
    return found.items();
}

int32_t Lookahead::seen(int32_t number) {
    std::vector<int32_t> above;
    while (!seen_.contains(number) &&
           (frames_[number].kind == FrameKind::REST || frames_[number].kind == FrameKind::AGAIN)) {
        above.push_back(number);
        number = frames_[number].parent;
    }
    int32_t found = seen_.try_emplace(number, number).first->second;
    const auto count = [this](int64_t turns) { return turns <= reach_ ? turns : ENDLESS; };
    for (auto current = above.rbegin(); current != above.rend(); ++current) {
        const Frame& frame = frames_[*current];
        found = frame.kind == FrameKind::REST
                    ? frames_.rest(frame.node, frame.index, found)
                    : frames_.again(frame.node, count(frame.least), count(frame.most), found);
        seen_[*current] = found;
    }
    return found;
}

// ------------------------------------------------------------------------------------------------ plain characters

namespace {

constexpr int HOPS = 4;  // repeats of plain characters in a row that are added up
constexpr int32_t PLAIN_BYTES[][2] = {{0x20, 0x21}, {0x23, 0x5b}, {0x5d, 0x7e}, {0x80, 0xff}};

}  // namespace

int64_t PlainText::run(std::span<const Position> positions) {
    const std::vector<Position> given(positions.begin(), positions.end());
    int64_t most = 0;
    for (Position position : given)
        if (places_.plain(place_of(position))) most = std::max(most, run(place_of(position), frame_of(position), HOPS));
    return most;
}

int64_t PlainText::run(int32_t place, int32_t number, int hops) {
    const int64_t plain = places_.plain(place);
    if (plain != 1 || places_[place].kind != PlaceKind::CHARACTER) return plain;
    int64_t found = 1;
    if (frames_[number].kind == FrameKind::AGAIN && turns_alike(place, number)) {
        if (frames_[number].most == ENDLESS) return ENDLESS;
        found += frames_[number].most;
        number = frames_[number].parent;
    }
    if (hops == 0) return found;
    int64_t later = 0;
    for (Position position : frames_.closure(number).positions.items())
        if (places_.plain(place_of(position)))
            later = std::max(later, run(place_of(position), frame_of(position), hops - 1));
    return std::min(found + later, ENDLESS);
}

int64_t PlainText::limit(std::span<const Position> positions) {
    const std::vector<Position> given(positions.begin(), positions.end());
    int64_t most = 0;
    for (Position position : given) most = std::max(most, limit(place_of(position), frame_of(position), HOPS));
    return most;
}

int64_t PlainText::limit(int32_t place, int32_t number, int hops) {
    if (!takes_plain(place)) return 0;
    if (hops == 0 || places_[place].kind != PlaceKind::CHARACTER) return ENDLESS;
    int64_t found = 1;
    if (frames_[number].kind == FrameKind::AGAIN && turns_only(place, number)) {
        if (frames_[number].most == ENDLESS) return ENDLESS;
        found += frames_[number].most;
        number = frames_[number].parent;
    }
    int64_t later = 0;
    for (Position position : frames_.closure(number).positions.items())
        later = std::max(later, limit(place_of(position), frame_of(position), hops - 1));
    return std::min(found + later, ENDLESS);
}

bool PlainText::takes_plain(int32_t place) {
    for (const Edge& edge : places_.edges(place))
        for (const auto& bytes : PLAIN_BYTES)
            if (edge.first <= bytes[1] && edge.last >= bytes[0]) return true;
    return false;
}

Position PlainText::next_turn(int32_t place, int32_t number) {
    const Frame frame = frames_[number];
    return position_of(place, frames_.again(frame.node, one_less(frame.least), one_less(frame.most), frame.parent));
}

bool PlainText::turns_only(int32_t place, int32_t number) {
    Ordered<Position> expected;
    expected.insert(next_turn(place, number));
    if (frames_[number].least == 0)
        for (Position position : frames_.closure(frames_[number].parent).positions.items()) expected.insert(position);
    for (Position position : frames_.closure(number).positions.items())
        if (expected.insert(position)) return false;
    return true;
}

bool PlainText::turns_alike(int32_t place, int32_t number) {
    const Position next = next_turn(place, number);
    const std::vector<Position>& positions = frames_.closure(number).positions.items();
    return std::find(positions.begin(), positions.end(), next) != positions.end();
}

// ------------------------------------------------------------------------------------------------ shortest texts

namespace {

// The bytes that a shortest text would rather have, the best first.
struct Liking {
    int rank[256];

    Liking() {
        const std::string_view liked = "a0bcdefghijklmnopqrstuvwxyz123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_-. ";
        const auto count = int(liked.size());
        for (int byte = 0; byte < 256; byte++) rank[byte] = count + (byte < 0x20 ? 256 : 0) + byte;
        for (int i = 0; i < count; i++) rank[uint8_t(liked[i])] = i;
    }

    int32_t best(int32_t first, int32_t last) const {
        int32_t found = first;
        for (int32_t byte = first; byte <= last; byte++)
            if (rank[byte] < rank[found]) found = byte;
        return found;
    }
};

const Liking LIKING;

}  // namespace

std::vector<uint8_t> ShortestText::from(int32_t place, int32_t frame) {
    std::vector<uint8_t> text;
    const int32_t rest = from_leaf(place, text);
    if (rest != NONE) of_node(rest, frames_[frame].room, text);
    while (frames_[frame].kind != FrameKind::ROOT) {
        const Frame current = frames_[frame];
        if (current.kind == FrameKind::RETURN) {
            int64_t least = std::numeric_limits<int64_t>::max();
            for (int32_t parent : current.parents)
                if (const int64_t length = frames_.length(parent); length < least) least = length, frame = parent;
            continue;
        }
        if (current.kind == FrameKind::REST) {
            for (int32_t i = current.index; i < nodes_[current.node].part_count; i++)
                of_node(nodes_.part(current.node, i), current.room, text);
        } else {
            of_copies(nodes_[current.node].body, current.room, current.least, text);
        }
        frame = current.parent;
    }
    return text;
}

// Writes a leftmost derivation, with what is still to be written on a stack.
void ShortestText::of_node(int32_t start, int32_t start_room, std::vector<uint8_t>& text) {
    std::vector<std::pair<int32_t, int32_t>> waiting{{start, start_room}};
    while (!waiting.empty()) {
        const auto [node, room] = waiting.back();
        waiting.pop_back();
        switch (nodes_[node].kind) {
            case NodeKind::LEAF:
                if (const int32_t rest = from_leaf(nodes_[node].body, text); rest != NONE)
                    waiting.emplace_back(rest, room);
                break;
            case NodeKind::SEQUENCE:
                for (int32_t i = nodes_[node].part_count - 1; i >= 0; i--)
                    waiting.emplace_back(nodes_.part(node, i), room);
                break;
            case NodeKind::OPTIONS: {
                int64_t least = std::numeric_limits<int64_t>::max();
                int32_t chosen = NONE;
                for (int32_t i = 0; i < nodes_[node].part_count; i++) {
                    const int32_t option = nodes_.part(node, i);
                    if (const int64_t length = nodes_.shortest(option, room); length < least)
                        least = length, chosen = option;
                }
                waiting.emplace_back(chosen, room);
                break;
            }
            case NodeKind::LOOP:
                of_copies(nodes_[node].body, room, nodes_[node].least, text);
                break;
            case NodeKind::REMAINING: {
                const std::vector<int32_t> parts = nodes_.shortest_parts(node, room);
                for (auto part = parts.rbegin(); part != parts.rend(); ++part) waiting.emplace_back(*part, room);
                break;
            }
            case NodeKind::OPENED:
                waiting.emplace_back(nodes_.body(node), room);
                break;
            case NodeKind::NESTED:
                waiting.emplace_back(nodes_.body(node), room - 1);
                break;
            case NodeKind::UNASKED:
                break;
        }
    }
}

void ShortestText::of_copies(int32_t node, int32_t room, int64_t count, std::vector<uint8_t>& text) {
    if (!count) return;
    std::vector<uint8_t> copy;
    of_node(node, room, copy);
    for (int64_t i = 0; i < count; i++) text.insert(text.end(), copy.begin(), copy.end());
}

// Writes the way out of a leaf → the node that has to follow it, or NONE.
int32_t ShortestText::from_leaf(int32_t place, std::vector<uint8_t>& text) {
    while (true) {
        const Place here = places_[place];
        if (here.accepting && here.shortest == 0) return NONE;
        for (int32_t i = 0; i < here.rest_count; i++) {
            const int32_t rest = places_.rests(place)[i];
            if (nodes_.shortest(rest, 0) == here.shortest) return rest;
        }
        int32_t byte = NONE, following = NONE;
        for (const Edge& edge : places_.edges(place)) {
            if (places_[edge.place].shortest >= here.shortest) continue;
            const int32_t best = LIKING.best(edge.first, edge.last);
            if (byte == NONE || LIKING.rank[best] < LIKING.rank[byte]) byte = best, following = edge.place;
        }
        text.push_back(uint8_t(byte));
        place = following;
    }
}

}  // namespace umbel
