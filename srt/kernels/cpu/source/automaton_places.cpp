// Places: where a text stands inside a literal, a trie of literals, a set of characters or a character automaton.
#include <algorithm>
#include <string>

#include "automaton.h"

namespace umbel {
namespace {

constexpr int32_t LAST_CODE = 0x10ffff, LAST_ESCAPED = 0x5c;

void clip(const std::vector<Labelled>& values, int32_t first, int32_t last, std::vector<Labelled>& found) {
    for (const Labelled& value : values)
        if (value.first <= last && value.last >= first)
            found.push_back({std::max(value.first, first), std::min(value.last, last), value.place});
}

// How JSON strings write the code points that they do not hold as themselves; the others are empty.
struct Escapes {
    std::string spellings[LAST_ESCAPED + 1];

    Escapes() {
        const char* const digits = "0123456789abcdef";
        for (int32_t code = 0; code < 0x20; code++)
            spellings[code] = std::string("\\u00") + digits[code >> 4] + digits[code & 15];
        for (const char* letter = "\bb\tt\nn\ff\rr\"\"\\\\"; *letter; letter += 2)
            spellings[int32_t(letter[0])] = {'\\', letter[1]};
    }
};

const Escapes ESCAPES;

}  // namespace

Places::Places(const Asking& ask) : ask_(ask) {
    Place end;
    end.accepting = end.terminal = end.opened = true;
    places_.push_back(end);
}

int32_t Places::add(const Place& place) {
    places_.push_back(place);
    return int32_t(places_.size()) - 1;
}

int32_t Places::text(const uint8_t* data, int32_t length) {
    const auto begin = int32_t(bytes_.size());
    bytes_.insert(bytes_.end(), data, data + length);
    return text_at(begin, length);
}

int32_t Places::text_at(int32_t data, int32_t length) {
    Place place;
    place.kind = PlaceKind::TEXT;
    place.begin = data;
    place.count = length;
    place.shortest = length;
    place.accepting = place.terminal = length == 0;
    return add(place);
}

int32_t Places::trie(const uint8_t* data, std::span<const LiteralOption> options) {
    const auto first = int32_t(options_.size()), begin = int32_t(members_.size());
    for (const LiteralOption& option : options) {
        members_.push_back(int32_t(options_.size()));
        options_.push_back({int32_t(bytes_.size()), option.length, option.rest, option.after});
        bytes_.insert(bytes_.end(), data + option.data, data + option.data + option.length);
    }
    return trie_at(begin, int32_t(options_.size()) - first, 0);
}

int32_t Places::trie_at(int32_t begin, int32_t count, int32_t depth) {
    Place place;
    place.kind = PlaceKind::TRIE;
    place.begin = begin;
    place.count = count;
    place.depth = depth;
    place.shortest = ENDLESS;
    place.terminal = true;
    place.rests = int32_t(rests_.size());
    for (int32_t i = begin; i < begin + count; i++) {
        const LiteralOption& option = options_[members_[i]];
        place.shortest = std::min(place.shortest, option.length - depth + option.after);
        if (option.length > depth)
            place.terminal = false;
        else if (option.rest == NONE)
            place.accepting = true;
        else
            rests_.push_back(option.rest);
    }
    place.rest_count = int32_t(rests_.size()) - place.rests;
    return add(place);
}

int32_t Places::character(std::span<const Labelled> ranges, bool spelled, int64_t shortest, int64_t plain) {
    Place place;
    place.kind = PlaceKind::CHARACTER;
    place.begin = int32_t(labels_.size());
    place.count = int32_t(ranges.size());
    labels_.insert(labels_.end(), ranges.begin(), ranges.end());
    place.terminal = ranges.empty();
    place.spelled = spelled;
    place.shortest = shortest;
    place.plain = plain;
    return add(place);
}

int32_t Places::never(int64_t shortest, int64_t plain) {
    Place place;
    place.terminal = place.opened = true;
    place.shortest = shortest;
    place.plain = plain;
    return add(place);
}

int32_t Places::states(std::span<const int64_t> shortest, std::span<const uint8_t> flags, bool spelled) {
    owners_.push_back({{shortest.begin(), shortest.end()}, {flags.begin(), flags.end()}, {}, spelled});
    owners_.back().places.assign(shortest.size(), NONE);
    return int32_t(owners_.size());
}

int32_t Places::state(int32_t owner, int32_t state) {
    CharacterStates& own = owners_[owner - 1];
    if (own.places[state] == NONE) own.places[state] = own.flags[state] == 3 ? END : add_state(owner, state);
    return own.places[state];
}

int32_t Places::begun_state(int32_t owner, int32_t state, int64_t shortest) {
    const int32_t begun = add_state(owner, state);
    places_[begun].accepting = false;
    places_[begun].shortest = shortest;
    return begun;
}

int32_t Places::add_state(int32_t owner, int32_t state) {
    const CharacterStates& own = owners_[owner - 1];
    Place place;
    place.kind = PlaceKind::STATE;
    place.owner = owner;
    place.depth = state;
    place.shortest = own.shortest[state];
    place.accepting = own.flags[state] & 1;
    place.terminal = own.flags[state] & 2;
    place.spelled = own.spelled;
    place.plain = NONE;
    return add(place);
}

std::vector<Labelled> Places::state_characters(const Place& place) {
    ask_(Question::CHARACTERS, place.owner, place.depth);
    std::vector<Labelled> characters;
    for (const Labelled& range : answer_)
        if (owners_[place.owner - 1].shortest[range.place] < ENDLESS)
            characters.push_back({range.first, range.last, state(place.owner, range.place)});
    std::sort(characters.begin(), characters.end(),
              [](const Labelled& a, const Labelled& b) { return a.first < b.first; });
    return characters;
}

int64_t Places::plain(int32_t place) {
    if (places_[place].plain == NONE) {
        const int64_t plain = ask_(Question::PLAIN, places_[place].owner, places_[place].depth);
        places_[place].plain = plain;
    }
    return places_[place].plain;
}

std::span<const Edge> Places::edges(int32_t place) {
    if (!places_[place].opened) open(place);
    const Place& known = places_[place];
    return {edges_.data() + known.edges, static_cast<std::size_t>(known.edge_count)};
}

void Places::keep(int32_t place, const std::vector<Edge>& edges) {
    Place& opened = places_[place];
    opened.edges = int32_t(edges_.size());
    opened.edge_count = int32_t(edges.size());
    opened.opened = true;
    edges_.insert(edges_.end(), edges.begin(), edges.end());
}

void Places::open(int32_t number) {
    const Place place = places_[number];
    std::vector<Edge> edges;
    switch (place.kind) {
        case PlaceKind::TEXT:
            if (place.count) {
                const int32_t byte = bytes_[place.begin];
                edges.push_back({byte, byte, text_at(place.begin + 1, place.count - 1)});
            }
            break;
        case PlaceKind::TRIE:
            edges = trie_edges(place);
            break;
        case PlaceKind::CHARACTER: {
            const auto begin = labels_.begin() + place.begin;
            edges = character_edges({begin, begin + place.count}, place.spelled, 0);
            break;
        }
        case PlaceKind::TAIL: {
            const auto begin = labels_.begin() + place.begin;
            leading_edges({begin, begin + place.count}, place.depth - 1, 0x80, place.owner, edges);
            break;
        }
        case PlaceKind::STATE:
            edges = character_edges(state_characters(place), place.spelled, place.owner);
            break;
        case PlaceKind::BYTES:
            break;
    }
    keep(number, edges);
}

std::vector<Edge> Places::trie_edges(const Place& place) {
    int32_t counts[256] = {};
    for (int32_t i = place.begin; i < place.begin + place.count; i++) {
        const LiteralOption& option = options_[members_[i]];
        if (option.length > place.depth) counts[bytes_[option.data + place.depth]]++;
    }
    int32_t begins[256], next = int32_t(members_.size());
    for (int byte = 0; byte < 256; byte++) begins[byte] = next, next += counts[byte];
    members_.resize(next);
    int32_t ends[256];
    std::copy(begins, begins + 256, ends);
    for (int32_t i = place.begin; i < place.begin + place.count; i++) {
        const LiteralOption& option = options_[members_[i]];
        if (option.length > place.depth) members_[ends[bytes_[option.data + place.depth]]++] = members_[i];
    }
    std::vector<Edge> edges;
    const int32_t depth = place.depth + 1;
    for (int byte = 0; byte < 256; byte++) {
        if (!counts[byte]) continue;
        const LiteralOption& option = options_[members_[begins[byte]]];
        const bool alone = counts[byte] == 1 && option.rest == NONE;
        edges.push_back({byte, byte, alone ? text_at(option.data + depth, option.length - depth)
                                           : trie_at(begins[byte], counts[byte], depth)});
    }
    return edges;
}

std::vector<Edge> Places::character_edges(const std::vector<Labelled>& characters, bool spelled, int32_t owner) {
    std::vector<Labelled> raw;
    clip(characters, 0, 0xd7ff, raw);  // without surrogates
    clip(characters, 0xe000, LAST_CODE, raw);
    std::vector<Edge> edges;
    if (spelled) {
        std::vector<Labelled> themselves;
        clip(raw, 0x20, 0x21, themselves);
        clip(raw, 0x23, 0x5b, themselves);
        clip(raw, 0x5d, LAST_CODE, themselves);
        std::vector<Spelling> escaped;
        for (const Labelled& range : raw)
            for (int32_t code = range.first; code <= std::min(range.last, LAST_ESCAPED); code++)
                if (!ESCAPES.spellings[code].empty()) escaped.emplace_back(ESCAPES.spellings[code], range.place);
        std::sort(escaped.begin(), escaped.end());
        edges = spelling_edges(escaped, 0);
        raw = std::move(themselves);
    }
    std::vector<Labelled> part;
    clip(raw, 0, 0x7f, part);
    for (const Labelled& range : part) edges.push_back({range.first, range.last, range.place});
    struct {
        int32_t marker, first, last, tail_bytes;
    } const lengths[] = {{0xc0, 0x80, 0x7ff, 1}, {0xe0, 0x800, 0xffff, 2}, {0xf0, 0x10000, LAST_CODE, 3}};
    for (const auto& length : lengths) {
        part.clear();
        clip(raw, length.first, length.last, part);
        leading_edges(part, length.tail_bytes, length.marker, owner, edges);
    }
    std::stable_sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.first < b.first; });
    return edges;
}

int32_t Places::tail(int32_t remaining, const std::vector<Labelled>& values, int32_t owner) {
    if (remaining == 0) return values[0].place;
    std::vector<int32_t> key{remaining, owner};
    int64_t shortest = MOST_LENGTH;
    for (const Labelled& value : values) {
        key.insert(key.end(), {value.first, value.last, value.place});
        shortest = std::min(shortest, places_[value.place].shortest);
    }
    const auto [known, fresh] = tails_.try_emplace(std::move(key), NONE);
    if (fresh) {
        Place place;
        place.kind = PlaceKind::TAIL;
        place.begin = int32_t(labels_.size());
        place.count = int32_t(values.size());
        place.depth = remaining;
        place.owner = owner;
        place.shortest = remaining + shortest;
        labels_.insert(labels_.end(), values.begin(), values.end());
        known->second = add(place);
    }
    return known->second;
}

// Edges of the byte above `remaining` continuation bytes, its bits added to `marker`.
void Places::leading_edges(const std::vector<Labelled>& values, int32_t remaining, int32_t marker, int32_t owner,
                           std::vector<Edge>& edges) {
    struct Group {
        int32_t head, end;
        std::vector<Labelled> parts;
    };
    const int32_t shift = 6 * remaining, low = (1 << shift) - 1;
    std::vector<Group> groups;
    for (const Labelled& value : values) {
        int32_t head = value.first >> shift;
        const int32_t end = value.last >> shift;
        const bool whole_end = (value.last & low) == low;
        if ((value.first & low) || (head == end && !whole_end)) {
            const Labelled part{value.first & low, head == end ? value.last & low : low, value.place};
            if (!groups.empty() && groups.back().head == head)
                groups.back().parts.push_back(part);
            else
                groups.push_back({head, head, {part}});
            head++;
        }
        if (head <= end && !whole_end) {
            if (head < end) groups.push_back({head, end - 1, {{0, low, value.place}}});
            groups.push_back({end, end, {{0, value.last & low, value.place}}});
        } else if (head <= end) {
            groups.push_back({head, end, {{0, low, value.place}}});
        }
    }
    const std::size_t begin = edges.size();
    for (const Group& group : groups) {
        const int32_t place = tail(remaining, group.parts, owner);
        if (edges.size() > begin && edges.back().place == place && edges.back().last == marker + group.head - 1)
            edges.back().last = marker + group.end;
        else
            edges.push_back({marker + group.head, marker + group.end, place});
    }
}

// Edges of a trie of spellings, which ascend, and none of which begins another.
std::vector<Edge> Places::spelling_edges(std::span<const Spelling> spellings, std::size_t depth) {
    std::vector<Edge> edges;
    for (std::size_t begin = 0, end = 0; begin < spellings.size(); begin = end) {
        const int32_t byte = uint8_t(spellings[begin].first[depth]);
        while (end < spellings.size() && uint8_t(spellings[end].first[depth]) == byte) end++;
        if (spellings[begin].first.size() == depth + 1) {
            edges.push_back({byte, byte, spellings[begin].second});
            continue;
        }
        const std::vector<Edge> longer = spelling_edges(spellings.subspan(begin, end - begin), depth + 1);
        Place place;
        place.shortest = MOST_LENGTH;
        for (const Edge& edge : longer) place.shortest = std::min(place.shortest, 1 + places_[edge.place].shortest);
        const int32_t inside = add(place);
        keep(inside, longer);
        edges.push_back({byte, byte, inside});
    }
    return edges;
}

}  // namespace umbel
