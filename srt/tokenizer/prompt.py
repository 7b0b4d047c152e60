"""Turns a prompt's parts into one list of ids, encoding only new text. Its media are decoded pictures by then: `Shown`.

    parts     [ Text  Text ][ Generated ][ Text(control) Text ]
    runs      "constant text"    ids      <id> "constant text"       a run is encoded as one string
    blocks    [ about 1,024 characters ][ … ][ 128 ][ 128 ][ rest ]    cut where the tokenizer allows it (boundaries.py)

Blocks are cached by their text. The prompt of a program's next call begins with the parts of the last one, the prompts
of a batch begin with the same examples, and the branches of a fork with the same document. Shared text is cut at the
same places, so only the text after it is encoded. The last block of a text may grow or branch, so it consists of small
ones, and encoding begins at the last small block.
"""

import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from itertools import groupby, islice
from sys import getsizeof
from typing import NamedTuple

import msgspec

from ...lang.errors import CapabilityError
from ...lang.prompt import Generated, Media, Part, Private, Text, namespace, told_apart
from ...lang.protocol import CreateCache, GenRequest, Hint, Locate, ScoreRequest, Tokenize
from ..core.batch import PICTURE_BASE, picture_tokens
from ..multimodal.cache import Picture
from ..multimodal.format import PictureFormat
from .tokenizer import Tokenizer

Showable = GenRequest | ScoreRequest | CreateCache | Hint | Locate  # the messages whose prompt may show media
Prompted = Showable | Tokenize  # the messages that have a prompt


class Shown(Media, frozen=True, kw_only=True, tag="shown"):
    """A decoded picture, or the frames of a clip. It is never sent and has no bytes: the cache has the pixels."""

    pictures: tuple[Picture, ...]


def pictures_of(prompt: Iterable[Part]) -> tuple[Picture, ...]:
    """Returns all pictures of a prompt, in order."""
    return tuple(picture for part in prompt if isinstance(part, Shown) for picture in part.pictures)


def media_of(message: Showable) -> list[Media]:
    """Returns the media of a message that are not decoded yet."""
    return [part for prompt in prompts_of(message) for part in prompt if type(part) is Media]


def prompts_of(message: Showable) -> tuple[tuple[Part, ...], ...]:
    """Returns the prompts of a message: a Locate may have several."""
    return (message.prompt, *message.others) if isinstance(message, Locate) else (message.prompt,)


def without_bytes(message: Showable) -> Showable:
    """Removes the media bytes of a waiting message: the decoder holds them once for all messages."""
    return replace_media(message, lambda part: msgspec.structs.replace(part, data=b""))


def replace_media(message: Showable, change: Callable[[Media], Media]) -> Showable:
    """Replaces the media of a message, in the order of `media_of`."""

    def changed(prompt: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(change(part) if type(part) is Media else part for part in prompt)

    prompt = changed(message.prompt)
    if isinstance(message, Locate):
        return msgspec.structs.replace(message, prompt=prompt, others=tuple(map(changed, message.others)))
    return msgspec.structs.replace(message, prompt=prompt)


_ENTRY = 250  # bytes: the entry of the dictionary, two tuples
_TOKEN = 36  # bytes: an integer and the reference to it


class TokenCache:
    """Caches token ids by text; evicts the least recently used.

    Args:
        most_bytes: limit of memory; 0 keeps nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[Hashable, tuple[Sequence[int], int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Sequence[int] | None:
        """Returns the ids of a key, which counts as used now; None when it is not cached."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Caches the ids of a key: a text, or a tuple that holds one."""
        size = _ENTRY + _TOKEN * len(token_ids) + _weight(key)
        if size > self._most:
            return
        known = self._entries.pop(key, None)
        self.bytes += size - (0 if known is None else known[1])
        self._entries[key] = token_ids, size
        while self.bytes > self._most:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed

    def namespace(self, salt: str) -> "Namespace":
        """Returns the part of the cache for one salt."""
        return Namespace(self, salt)


class Namespace:
    """The part of a TokenCache for requests with one salt."""

    def __init__(self, cache: TokenCache, salt: str) -> None:
        self._cache = cache
        self._salt = salt

    def __contains__(self, key: Hashable) -> bool:
        return (self._salt, key) in self._cache

    def get(self, key: Hashable) -> Sequence[int] | None:
        return self._cache.get((self._salt, key))

    def put(self, key: Hashable, token_ids: Sequence[int]) -> None:
        self._cache.put((self._salt, key), token_ids)


def _weight(key: Hashable) -> int:
    return getsizeof(key) + (sum(map(_weight, key)) if isinstance(key, tuple) else 0)


class Beginning(NamedTuple):
    """The first parts of a prompt, which were encoded before. They end with generated tokens."""

    parts: int
    token_ids: "array[int] | list[int]"
    characters: int  # of text that was encoded for them


_NO_BEGINNING = Beginning(0, [], 0)
_PART = 400  # bytes: a part with a short text or a few tokens, which the key keeps
LEAST_PARTS = 16  # of a beginning; encoding fewer takes no longer than looking for them


class Beginnings:
    """Remembers the ids of long prompts up to their last generated text, by their parts.

    The next call of a session begins with the parts of the last one. Hashing and comparing them takes a twentieth of
    encoding them.

    Args:
        most_bytes: limit of memory, roughly; the least recently used ones are dropped.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, tuple[Part, ...]], Beginning] = OrderedDict()
        self._last: tuple[str, Sequence[Part], Beginning] = ("", (), _NO_BEGINNING)  # of this very prompt

    def find(self, salt: str, parts: Sequence[Part]) -> Beginning:
        """Returns the longest known beginning, of the two that end with the last generated texts."""
        if len(parts) < LEAST_PARTS:
            return _NO_BEGINNING
        if self._last[1] is parts and self._last[0] == salt:
            return self._last[2]
        found = _NO_BEGINNING
        for end in islice(_generated_ends(parts), 2):
            key = salt, tuple(parts[:end])
            if (known := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                found = known
                break
        self._last = salt, parts, found
        return found

    def put(self, salt: str, parts: Sequence[Part], token_ids: Sequence[int], characters: int) -> None:
        """Remembers the ids of parts that end with generated text."""
        key = salt, tuple(parts)
        if key in self._entries:
            return
        self._entries[key] = entry = Beginning(len(parts), array("i", token_ids), characters)
        self._bytes += _size_of(entry)
        while self._bytes > self._most:
            self._bytes -= _size_of(self._entries.popitem(last=False)[1])


def _size_of(entry: Beginning) -> int:
    return _ENTRY + _PART * entry.parts + 12 * len(entry.token_ids) + entry.characters


def _generated_ends(parts: Sequence[Part]) -> Iterator[int]:
    """Yields the ends of long beginnings that end with generated tokens, the last one first."""
    for end in range(len(parts), LEAST_PARTS - 1, -1):
        part = parts[end - 1]
        if isinstance(part, Generated) and part.token_ids:
            yield end


CACHE_BYTES = 64 * 2**20  # some 1,500,000 tokens
BLOCK = 1024  # characters, and more until the next boundary
SMALL_BLOCK = 128
LONG = 8192  # new characters: about 3 ms
_SCAFFOLDING = 1024  # characters; longer control text is split each time
_SCAFFOLDINGS = 1024  # control texts whose pieces are cached; a template has a handful

Key = str | tuple[str]  # a text, or in a tuple the text that begins a sequence


class PromptEncoder:
    """Encodes a prompt's parts → ids, with one BOS.

    Constant text is encoded in maximal runs: control tokens (which only scaffolding may contain), generated ids and the
    beginning of a private part end a run, other part boundaries do not. A picture becomes the ids of its number,
    between the control text of its format.

    Args:
        cache_bytes: memory for the tokens of earlier texts; 0 encodes every text whole and anew.
        pictures: the model's picture format; None when it reads text only.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES, pictures: PictureFormat | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._pictures = pictures
        self._characters: Counter[str] = Counter()  # "asked" for, and "tokenized" among them
        self._memory = TokenCache(cache_bytes) if cache_bytes else None
        self._cache: TokenCache | Namespace | None = self._memory  # the part in use
        self._beginnings = Beginnings(cache_bytes // 4)  # of all salts
        self._salt = ""
        names = sorted(filter(None, tokenizer.special_ids))
        self._control = re.compile(f"({any_of(names)})") if names else None
        self._pieces: dict[str, list[str]] = {}
        self._longest: list[int] = []  # once it was asked for; shared by the encoders of all salts

    def of(self, message: Prompted) -> "PromptEncoder":
        """Returns the encoder for the prompt of a message: for all of it that of the namespace where it ends.

        So every tenant has shared text before a private part tokenized once for itself."""
        return self.salted(namespace(message.origin.salt, message.prompt))

    def salted(self, salt: str) -> "PromptEncoder":
        """Returns the encoder for requests with this salt, which finds their texts only.

        Memory limit and counters are shared."""
        if not salt or self._memory is None:
            return self
        other = copy(self)
        other._cache = self._memory.namespace(salt)
        other._salt = salt
        return other

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of characters that were tokenized, and that were found in the cache."""
        tokenized = self._characters["tokenized"]
        return {
            "tokenized_characters": tokenized,
            "reused_characters": max(
                0, self._characters["asked"] - tokenized
            ),  # some texts are learned before they are requested
        }

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Encodes a prompt. Raises CapabilityError when it holds media that are not `Shown`."""
        assert self._pictures is None or not _unseen(parts), "the gateway shows what it encodes"
        ids, start = self._encode_beginning(parts)
        ids += self._encode_items(self._items(parts[start:], inside=start > 0))
        return ids

    def known_parts(self, parts: Sequence[Part]) -> int:
        """Returns how many of the first parts are those of an earlier prompt of this salt, which was encoded."""
        return self._beginning(parts).parts

    def _beginning(self, parts: Sequence[Part]) -> Beginning:
        if self._memory is None or self._pictures is not None:
            return _NO_BEGINNING
        return self._beginnings.find(self._salt, parts)

    def _encode_beginning(self, parts: Sequence[Part]) -> tuple[list[int], int]:
        """Returns the ids of the parts up to the last generated text of a long prompt, and their number.

        What an earlier call has encoded is taken from there."""
        known = self._beginning(parts)
        ids, start, before = list(known.token_ids), known.parts, self._characters["asked"]
        self._characters["asked"] += known.characters
        if self._memory is None or self._pictures is not None:
            return ids, start
        end = next(_generated_ends(parts), 0)
        if end > start:
            ids += self._encode_items(self._items(parts[start:end], inside=start > 0))
            if len(ids) < 2:
                return [], 0  # nothing but BOS so far
            self._beginnings.put(self._salt, parts[:end], ids, self._characters["asked"] - before)
        return ids, max(start, end)

    def encode_endings(self, parts: Sequence[Part], endings: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Returns the ids of a prompt, and of the prompt with each of these constant texts appended.

        The part before the last block is the same for all of them, so it is assembled once.
        """
        assert self._pictures is None or not _unseen(parts), "the gateway shows what it encodes"
        before, known = self._encode_beginning(parts)
        items = list(self._items(parts[known:], inside=known > 0))
        start = 0 if known or self.tokenizer.bos_id is None else 1
        tail: Key = "" if known or any(items[start:]) else ("",)
        if len(items) > start and not isinstance(run := items[-1], list):
            blocks = [run] if self._cache is None else self._blocks(run, BLOCK)
            tail = blocks.pop()
            items[-1:] = blocks
        before += self._encode_items(items)
        text, first = _text(tail), isinstance(tail, tuple)

        def ended(ending: str) -> list[int]:
            ids = before.copy()
            if text or ending:
                self._extend(ids, text + ending, first=first)
            return ids

        return ended(""), [ended(ending) for ending in endings]

    def encode_marked(self, parts: Sequence[Part], places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Encodes a prompt, and counts the tokens before places that stay the same whatever follows.

            [ Text "Be helpful. Answer" ][ Text "s are short." ][ Text(control) "<end>" ]
                               place 1 ↑                  place 2 ↑
            place 1: " Answer" becomes another token by what follows, so the tokens of "Be helpful." count
            place 2: a control token follows and ends the run, so all tokens before it count

        Inside a run of text the tokens count up to the last boundary (boundaries.py) before the place; up to the
        beginning of the run where there is none. Healing, which may replace the last token of a prompt that ends in
        text, leaves them alone for the same reason.

        Args:
            places: numbers of parts; place p lies after parts[:p].

        Returns:
            (ids of the prompt, as `encode` returns them; for each place the number of tokens).
        """
        assert self._pictures is None or not _unseen(parts), "the gateway shows what it encodes"
        items = list(self._items(parts))
        ids: list[int] = []
        ends = [0]  # ends[i]: number of tokens of items[:i]
        for item in items:
            ids += self._encode_items((item,))
            ends.append(len(ids))
        lengths = []
        for place in places:
            before = list(self._items(parts[:place]))  # all but its last item are those of the whole prompt
            if not before or isinstance(run := before[-1], list):
                lengths.append(ends[len(before)])
            elif len(before) < len(items) and _text(run) == _text_of_run(items[len(before) - 1]):
                lengths.append(ends[len(before)])  # what follows has ended the run
            else:
                lengths.append(ends[len(before) - 1] + self._certain_tokens(run))
        return ids, lengths

    def _certain_tokens(self, run: Key) -> int:
        """Returns the number of tokens of a run's beginning that stay the same however the run goes on."""
        text = _text(run)
        cut = _last_boundary(self.tokenizer.boundary, text)
        ids: list[int] = []
        if cut:
            self._extend_with(ids, text[:cut], first=isinstance(run, tuple))
        return len(ids)

    def ends_in_text(self, parts: Sequence[Part]) -> bool:
        """Returns whether the prompt ends in text of the program, whose last token may have been another one.

        Scaffolding of a template ends where the model expects it. A prompt of one control text is a completion's own;
        it reads as plain text when it names no control token but BOS at its beginning.
        """
        last = parts[-1] if parts else None
        if not isinstance(last, Text) or not last.text or not last.control:
            return isinstance(last, Text) and bool(last.text)
        items = list(self._items(parts)) if len(parts) == 1 else []
        runs = items if self.tokenizer.bos_id is None else items[1:]
        return len(runs) == 1 and not isinstance(runs[0], list)

    def _encode_items(self, items: Iterable[Key | list[int]]) -> list[int]:
        ids: list[int] = []
        for item in items:
            match item:
                case list():
                    ids += item
                case str():
                    self._extend(ids, item, first=False)
                case (text,):
                    self._extend(ids, text, first=True)
        return ids

    def least_tokens(self, parts: Sequence[Part]) -> int:
        """Returns a bound that the tokens of a long prompt do not fall below, without encoding it; 0 for a short one.

        It is the number of its characters divided by the length of the longest token: 48 bytes in the default model.
        """
        if sum(len(part.text) for part in parts if isinstance(part, Text)) < LONG:
            return 0
        if not self._longest:
            self._longest.append(_longest_token(self.tokenizer))
        longest = self._longest[0]
        least = 0
        for part in parts:
            if isinstance(part, Generated):
                least += len(part.token_ids)
            elif isinstance(part, Text) and longest:
                least += len(part.text) // (longest if part.text.isascii() else longest * _SHRINKS)
        return least

    def is_long(self, parts: Sequence[Part]) -> bool:
        """Returns whether `encode` would take too long for an event loop."""
        if self._cache is None or sum(len(part.text) for part in parts if isinstance(part, Text)) < LONG:
            return False
        texts = (item for item in self._items(parts) if not isinstance(item, list))
        blocks = (block for text in texts for block in self._blocks(text, BLOCK))
        return sum(len(_text(block)) for block in blocks if block not in self._cache) >= LONG

    def new_texts(self, parts: Sequence[Part]) -> list[Key]:
        """Returns the texts of these parts that are not cached, for `learn`; [] without a cache."""
        if self._cache is None:
            return []
        return [
            key
            for item in self._items(parts)
            if not isinstance(item, list)
            for block in self._blocks(item, BLOCK)
            if block not in self._cache
            for key in self._parts(self._cache, block)
            if key not in self._cache
        ]

    def encode_texts(self, keys: Sequence[Key]) -> list[list[int]]:
        """Encodes texts → ids. Changes no state, so any thread may call it; tokenizers release the interpreter lock."""
        encode = self.tokenizer.encode
        return [encode(key, first=False) if isinstance(key, str) else encode(key[0], first=True) for key in keys]

    def learn(self, keys: Sequence[Key], token_ids: Sequence[list[int]]) -> None:
        """Caches the result of `encode_texts`."""
        assert self._cache is not None, "there are no new texts where nothing is kept"
        for key, ids in zip(keys, token_ids, strict=True):
            self._cache.put(key, ids)
            self._characters["tokenized"] += len(_text(key))

    # ------------------------------------------------------------------ runs

    def _items(self, parts: Sequence[Part], *, inside: bool = False) -> Iterator[Key | list[int]]:
        """Yields runs of text and the ids between them. A run that begins the sequence comes in a tuple.

        inside: the parts follow others of their prompt, and generated tokens.
        """
        tokenizer = self.tokenizer
        beginning = not inside  # nothing but BOS so far
        if beginning and tokenizer.bos_id is not None:
            yield [tokenizer.bos_id]
        run: list[str] = []

        def flush() -> Iterator[Key]:
            text = "".join(run)
            run.clear()
            if text:
                yield (text,) if beginning else text

        for part in self._written(parts):
            match part:
                case Text(text, False):
                    run.append(text)
                case Text(text, True):
                    for piece in self._split(text):
                        special = tokenizer.special_ids.get(piece)
                        if special is None:
                            run.append(piece)
                            continue
                        for key in flush():
                            yield key
                            beginning = False
                        if special != tokenizer.bos_id or not beginning:  # the template may write BOS itself
                            yield [special]
                            beginning = False
                case list():
                    for key in flush():
                        yield key
                    yield part
                    beginning = False
                case Private():  # ends the run, so no token holds text of both sides
                    for key in flush():
                        yield key
                        beginning = False
                    yield []
                case Generated(_, token_ids):
                    for key in flush():
                        yield key
                        beginning = False
                    # A prompt of ids may begin with BOS itself.
                    skipped = 1 if beginning and token_ids[:1] == (tokenizer.bos_id,) else 0
                    if len(token_ids) > skipped:
                        yield list(token_ids[skipped:])
                        beginning = False
        yield from flush()

    def _written(self, parts: Iterable[Part]) -> Iterator[Text | Generated | Private | list[int]]:
        """Yields the parts, with pictures replaced by their control text and ids."""
        form = self._pictures
        for part in parts:
            if not isinstance(part, Media):
                yield part
            elif form is None:
                raise CapabilityError(
                    f"{self.tokenizer.name} reads text only; remove {part.kind}(...) or load a vision model"
                )
            else:
                yield from _shown(part, form)

    def _split(self, text: str) -> list[str]:
        """Splits control text at names of control tokens; names are at the odd places."""
        if self._control is None:
            return [text]
        pieces = self._pieces.get(text)
        if pieces is None:
            pieces = self._control.split(text)
            if len(text) <= _SCAFFOLDING:
                if len(self._pieces) >= _SCAFFOLDINGS:
                    self._pieces.clear()
                self._pieces[text] = pieces
        return pieces

    # ------------------------------------------------------------------ blocks

    def _extend(self, ids: list[int], text: str, *, first: bool) -> None:
        self._characters["asked"] += len(text)
        self._extend_with(ids, text, first=first)

    def _extend_with(self, ids: list[int], text: str, *, first: bool) -> None:
        if self._cache is None:
            self._characters["tokenized"] += len(text)
            ids += self.tokenizer.encode(text, first=first)
            return
        for block in self._blocks((text,) if first else text, BLOCK):
            known = self._cache.get(block)
            ids += self._encode_block(self._cache, block) if known is None else known

    def _encode_block(self, cache: TokenCache | Namespace, block: Key) -> Sequence[int]:
        """Encodes a block that is not cached.

        The last block of a text may grow or branch, so it is cached in small ones too. One that has grown to its full
        size is assembled from them."""
        parts = self._parts(cache, block)
        if len(parts) == 1:
            return self._encode_new(cache, block)
        ids: list[int] = []
        for part in parts:
            known = cache.get(part)
            ids += self._encode_new(cache, part) if known is None else known
        cache.put(block, ids)
        return ids

    def _encode_new(self, cache: TokenCache | Namespace, key: Key) -> Sequence[int]:
        self._characters["tokenized"] += len(_text(key))
        (ids,) = self.encode_texts((key,))
        cache.put(key, ids)
        return ids

    def _parts(self, cache: TokenCache | Namespace, block: Key) -> list[Key]:
        """Returns the parts in which to encode a block that is not cached."""
        parts = self._blocks(block, SMALL_BLOCK)
        return parts if len(_text(block)) < BLOCK or parts[0] in cache else [block]

    def _blocks(self, key: Key, size: int) -> list[Key]:
        """Cuts at the first boundary after every `size` characters. The first block of a first text is a first text."""
        text = _text(key)
        boundary = self.tokenizer.boundary
        last = len(text) - size  # a rest that begins after it is short enough
        if last <= 0 or boundary is None:
            return [key]
        blocks: list[Key] = []
        start = 0
        while start < last and (found := boundary.search(text, start + size)) is not None:
            end = found.start()
            blocks.append(text[start:end])
            start = end
        blocks.append(text[start:])
        if isinstance(key, tuple):
            blocks[0] = (_text(blocks[0]),)
        return blocks


_SHRINKS = 3  # NFC may make so many bytes into one: three parts of a Korean syllable are one character


def _longest_token(tokenizer: Tokenizer) -> int:
    """Returns the bytes that one token stands for at most; 0 where that is not certain.

    A tokenizer with boundaries changes texts in place only (boundaries.py); one that spells every byte has no token for
    whatever it does not know.
    """
    spelled = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    if tokenizer.boundary is None or len({token for token in spelled if len(token) == 1}) < 256:
        return 0
    return max(map(len, [*spelled, *(name.encode() for name in tokenizer.special_ids)]))


_DEEPEST = 32  # groups in groups; the compiler of expressions calls itself for each


def any_of(names: Sequence[str], depth: int = 0) -> str:
    """Writes a regular expression that finds any of these names, the longest where several match.

    It is a trie: `<(?:bos|unused(?:1(?:0)?|2))>`. Models have thousands of names, and an alternation of all of them
    takes 10 s to split a megabyte of beginnings of names; the trie takes 10 ms.

    Args:
        names: in ascending order, no two alike.
    """
    if len(names) == 1:
        return re.escape(names[0])
    if depth == _DEEPEST:
        return "(?:" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")"
    least, greatest = names[0], names[-1]
    common = next((i for i, (a, b) in enumerate(zip(least, greatest, strict=False)) if a != b), len(least))
    rests = [name[common:] for name in names]
    branches = groupby(filter(None, rests), key=lambda rest: rest[0])
    inner = "|".join(any_of(list(branch), depth + 1) for _, branch in branches)
    return f"{re.escape(least[:common])}(?:{inner})" + ("" if rests[0] else "?")


def _shown(part: Media, form: PictureFormat) -> Iterator[Text | list[int]]:
    """Yields a picture, or the frames or parts of a clip, with the text around them."""
    pictures = part.pictures if isinstance(part, Shown) else (None,)  # None ends the text before it
    joined = form.clips == "joined" and part.kind == "video"
    for index, picture in enumerate(pictures):
        if picture is not None and picture.text:
            yield Text(picture.text)
        if not (joined and index):
            yield Text(form.before, control=True)
        yield [] if picture is None else picture_tokens(picture.number, picture.tokens)
        if not joined or index == len(pictures) - 1:
            yield Text(form.after, control=True)


def _unseen(parts: Iterable[Part]) -> bool:
    """Returns whether the parts hold media that are not decoded."""
    return any(isinstance(part, Media) and not isinstance(part, Shown) for part in parts)


def _text(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _text_of_run(item: Key | list[int]) -> str:
    assert not isinstance(item, list), "a run is longer in the whole prompt, or the same"
    return _text(item)


def _last_boundary(boundary: re.Pattern[str] | None, text: str) -> int:
    """Returns the last place before the end of a text where it may be cut, whatever follows it; 0: there is none."""
    window = SMALL_BLOCK
    while boundary is not None and text:
        start = max(0, len(text) - window)
        places = [found.start() for found in boundary.finditer(text, start)]
        if places:
            return places[-1]
        if not start:
            break
        window *= 4
    return 0


_NEAR = 32  # bytes in which a token is searched


def text_of(parts: Sequence[Part]) -> str:
    """Returns the text in which places are counted."""
    return "".join(told_apart(part) if isinstance(part, Media) else part.text for part in parts)


class MediaPlace(NamedTuple):
    """Bytes [start, end) of the text that stand for pictures, and the number of their tokens."""

    start: int
    end: int
    tokens: int


def media_places(parts: Sequence[Part]) -> list[MediaPlace]:
    """Finds the places of the pictures of a prompt, in order."""
    found: list[MediaPlace] = []
    place = 0
    for part in parts:
        size = len(text_of((part,)).encode("utf-8", "surrogatepass"))
        if isinstance(part, Shown):
            found.append(MediaPlace(place, place + size, sum(picture.tokens for picture in part.pictures)))
        place += size
    return found


def token_places(
    tokenizer: Tokenizer,
    text: str,
    token_ids: Sequence[int],
    wanted: Sequence[int],
    media: Sequence[MediaPlace] = (),
) -> list[int]:
    """Returns the characters at which tokens begin; the length of the text for indices after the last token.

        text      <s> T h e   c a t
        tokens    BOS|The| cat|            token 2 begins at character 6

    For explanations, on no call's path. Tokens are aligned with the bytes of the text. A control token takes the bytes
    of its name where the template wrote it. The first token of a picture takes all of its name; the others begin after
    it. A token that differs from the text (a tokenizer may rewrite spaces or letters) is searched a little further on,
    so such a place is a few characters off at most.

    Args:
        token_ids: ids of the whole prompt.
        wanted: token indices, in any order.
        media: all pictures of the prompt.
    """
    data = text.encode("utf-8", "surrogatepass")
    names = {token_id: name.encode() for name, token_id in tokenizer.special_ids.items()}
    last = max(wanted, default=0)
    found: dict[int, int] = {}
    place = 0
    shown = iter(media)
    left, after = 0, 0  # remaining tokens of the pictures here, and where the text goes on
    for index, token_id in enumerate(token_ids[: last + 1]):
        if token_id >= PICTURE_BASE:
            if not left:
                place, after, left = next(shown)
            found[index], place, left = place, after, left - 1
            continue
        spelled = tokenizer.token_bytes(token_id)
        start, place = _laid(data, place, spelled or names.get(token_id, b""), control=not spelled)
        found[index] = start
    return [_characters(data, found[index]) if index in found else len(text) for index in wanted]


def _laid(data: bytes, place: int, spelled: bytes, *, control: bool) -> tuple[int, int]:
    """Aligns a token expected at `place` → where it begins, and where the next one does."""
    if data.startswith(spelled, place):
        return place, place + len(spelled)
    if control:  # put there by the encoder, not by the text
        return place, place
    bare = spelled.lstrip()  # the first text of a sequence may have got a space
    if data.startswith(bare, place):
        return place, place + len(bare)
    near = data.find(spelled, place, place + len(spelled) + _NEAR)
    if near >= 0:
        return near, near + len(spelled)
    return place, min(len(data), place + len(spelled))


def _characters(data: bytes, place: int) -> int:
    """Converts a place in bytes to characters; inside a character, to its beginning."""
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place -= 1
    return len(data[:place].decode("utf-8", "surrogatepass"))
