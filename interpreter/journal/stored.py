"""The calls of one run that its journal has, and those that it gets: what `Calls` asks before it asks a backend.

    request ─► in the journal? ──yes──► its result, which costs nothing in this run
                  │ no
                  ▼
               the backend ─► result ─► a line of the journal

A call is found by its item of the batch, its place (the stream's path through the forks, the number of the call in the
stream, the try), and the digest of its request. So ten equal prompts in ten branches keep their ten answers, and a
prompt that has changed is never answered with an old result.
"""

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...lang.errors import JournalError
from ...lang.prompt import shown_name
from ...lang.protocol import Final, GenRequest, Scored, ScoreRequest
from ...lang.sampling import SamplingParams
from ..cache_explain.history import Asked, Intent, common_length, of_call, text_of
from ..speculation.speculator import LONG
from .file import JournalCall, JournalFile, JournalModel, PromptText, read_result, written_result
from .identity import digest_of, request_digest

if TYPE_CHECKING:
    from ..run import Run
    from .use import JournalUse

Result = TypeVar("Result", Final, Scored)

_CONTEXT = 60  # characters around a difference


class StoredCalls:
    """The calls of one run in a journal. Used on the loop of the run's streams.

    Args:
        run: has the backend, and the intents that requests serve.
        use: of the journal, by this run or its batch.
        item: of the batch.
        inner: the body of another program has started the run.
    """

    __slots__ = ("_asked", "_counts", "_file", "_inner", "_left", "_run", "_runs", "_texts", "_use", "item")

    def __init__(self, run: "Run", use: "JournalUse", file: JournalFile, item: str, *, inner: bool) -> None:
        self.item = item
        self._run = run
        self._use = use
        self._file = file
        self._inner = inner
        self._runs = 0  # that the body has started
        self._left = sum(map(len, file.calls.get(item, {}).values()))  # recorded calls that were not read yet
        self._counts: Counter[tuple[str, str]] = Counter()  # place, request → calls so far
        self._asked: dict[str, str] = {}  # digests of calls that are made now, by their ids
        self._texts: dict[str, tuple[int, str]] = {}  # stream → line and text of its last prompt

    def inner_use(self) -> "JournalUse":
        """Returns the use of the journal for the next run, or batch, that the body starts."""
        self._runs += 1
        return self._use.inner(self._file, f"{self.item}>{self._runs - 1}")

    def end(self) -> None:
        """Drops the texts of prompts: a state may live long after its run."""
        self._texts.clear()
        self._asked.clear()

    @property
    def reads(self) -> bool:
        """True while recorded calls are left: what comes next is probably read, and no prefix needs to be computed."""
        return self._left > 0

    # -------------------------------------------------------------------------------- calls

    def read(self, request: GenRequest | ScoreRequest, kind: type[Result]) -> Result | None:
        """Returns the recorded result of a call; None for one that is to be made.

        Raises:
            JournalError: the journal is closed, or has calls of another model; or it is replayed, and has no such call.
        """
        self._file.check_open()
        self._check_model()
        intent, place = self._placed(request)
        digest = self._digest(request)
        recorded = self._file.calls.get(self.item, {}).get(place, [])
        same = [number for found, number in recorded if found == digest]
        count = self._counts[place, digest]
        if count < len(same):
            self._counts[place, digest] += 1
            self._texts[_stream(place)] = same[count], "".join(map(text_of, request.prompt))
            return self._answer(request, same[count], kind)
        if self._use.mode.makes_calls:
            self._asked[request.id] = digest
            return None
        number = recorded[min(count, len(recorded) - 1)][1] if recorded else None
        difference = self._difference(request, intent, number)
        if not self._use.mode.compares:
            raise JournalError(f"{difference}\n{self._use.remedy}")
        self._use.differences.append(difference)
        answer = None if number is None else self._answer(request, number, kind)
        if number is None or answer is None:
            raise JournalError(difference)
        self._counts[place, self._file.call(number).request] += 1
        return answer

    def write(self, request: GenRequest | ScoreRequest, result: Final | Scored) -> None:
        """Appends a call that has ended, which `read` did not find. Raises JournalError where the file cannot be
        written."""
        intent, place = self._placed(request)
        digest = self._asked.pop(request.id)
        self._describe_model()
        text = "".join(map(text_of, request.prompt))
        price = self._run.ledger.price
        generation = request if isinstance(request, GenRequest) else None
        number = self._file.append(
            JournalCall(
                self.item,
                place,
                digest,
                self._run.backend.capabilities.name,
                intent.kind,
                intent.name,
                self._shortened(place, text),
                written_result(result),
                None if price is None else price.dollars(result.usage),
                None if generation is None else generation.sampling,
                None if generation is None else generation.constraint,
                request.choices if isinstance(request, ScoreRequest) else (),
            )
        )
        self._counts[place, digest] += 1
        self._texts[_stream(place)] = number, text

    def speculated(self, request_id: str) -> tuple[SamplingParams, ...] | None:
        """Returns the parameters of the call for more text that was made here; none of them where the plain call was
        made at once; None where nothing is recorded. What was decided then depends on what was learned until then."""
        _, place = self._placed_id(request_id.removesuffix(LONG))
        recorded = self._file.calls.get(self.item, {})
        if place + LONG in recorded:
            sampling = self._file.call(recorded[place + LONG][0][1]).sampling
            assert sampling is not None, "a generation has parameters"
            return (sampling,)
        return () if place in recorded else None

    def seed(self, place: str) -> int:
        """Returns a seed for the draw of a choice, the same in every run with this journal."""
        header = self._file.header
        draws = 0 if header is None else header.draws
        return int(digest_of(f"{draws} {self.item} {place}".encode()), 16) % 2**63

    def unasked(self) -> list[str]:
        """Returns the recorded calls that the run has not made, for a comparison."""
        asked = {place for place, _ in self._counts}
        missing = [lines for place, lines in self._file.calls.get(self.item, {}).items() if place not in asked]
        calls = [(number, self._file.call(number)) for lines in missing for _, number in lines]
        path = self._file.path
        return [
            f"item {self.item}, {call.kind} {call.name!r}: recorded in line {number} of {path}, not called now"
            for number, call in calls
        ]

    # -------------------------------------------------------------------------------- how

    def _placed(self, request: GenRequest | ScoreRequest) -> tuple[Intent, str]:
        return self._placed_id(request.id)

    def _placed_id(self, request_id: str) -> tuple[Intent, str]:
        """Returns the gen or select that a request serves, and its place."""
        found = self._run.log.intent_of(request_id)
        assert found is not None, "an executor announces its requests"
        intent, announced = found
        return intent, intent.place + request_id.removeprefix(announced)

    def _digest(self, request: GenRequest | ScoreRequest) -> str:
        return request_digest(request, self._run.backend.capabilities.name)

    def _answer(self, request: GenRequest | ScoreRequest, number: int, kind: type[Result]) -> Result | None:
        call = self._file.call(number)
        result = read_result(call.result)
        if not isinstance(result, kind):
            return None
        self._left -= 1
        self._run.ledger.note_read(result.usage, call.dollars)
        return _renamed(result, request.id)

    def _shortened(self, place: str, text: str) -> PromptText:
        """Writes a prompt as what it adds to an earlier one, of its stream or of that which it is forked from."""
        stream = _stream(place)
        while stream:
            base, earlier = self._texts.get(stream, (0, ""))
            kept = common_length(earlier, text)
            if kept:
                return PromptText(base, kept, text[kept:])
            stream = stream.rpartition(".")[0]
        return PromptText(0, 0, text)

    def _check_model(self) -> None:
        if self._inner or not self._use.strict:
            return
        recorded, name = self._file.model, self._run.backend.capabilities.name
        if recorded and recorded != name:
            raise JournalError(
                f"{self._file.path} has calls of the model {recorded!r}, and this run has {name!r}; write the backend "
                "of the journal, or journal= with the path of a new file"
            )

    def _describe_model(self) -> None:
        backend = self._run.backend
        if backend.capabilities.name in self._file.models:
            return
        template = backend.chat_template
        line = JournalModel(
            backend.capabilities, template.source, dict(template.tokens), dict(template.options), template.name
        )
        self._file.append(line, later=True)

    # -------------------------------------------------------------------------------- differences

    def _difference(self, request: GenRequest | ScoreRequest, intent: Intent, number: int | None) -> str:
        """Describes what tells a request from the recorded one in this line; None: there is none at its place."""
        head = f"item {self.item}, {intent.kind} {intent.name!r}{_line_of(intent)}"
        path = self._file.path
        if number is None:
            return f"{head}: {path} has no call at this place"
        call, recorded = self._file.call(number), self._file.text_of(number)
        own = request.prompt is intent.prompt.parts
        layout = of_call(Asked(intent, None if own else request.prompt, "", 0, 0))
        if layout.text == recorded:
            return f"{head}: line {number} of {path} has the same prompt with other parameters: {_other(request, call)}"
        place = common_length(layout.text, recorded)
        piece = layout.at(min(place, len(layout.text) - 1))
        source = None if piece is None or piece.source is None else piece.source.place
        said = "" if source is None else f", which {shown_name(source.file)}:{source.number} writes"
        return (
            f"{head}: the prompt differs from that of line {number} of {path} at character {place}{said}\n"
            f"  recorded: {_around(recorded, place)}\n"
            f"  now:      {_around(layout.text, place)}"
        )


def _stream(place: str) -> str:
    """Returns the path of the stream of a place."""
    return place.partition("/")[0]


def _renamed(result: Result, request_id: str) -> Result:
    return msgspec.structs.replace(result, id=request_id)


def _line_of(intent: Intent) -> str:
    place = None if intent.source is None else intent.source.place
    return "" if place is None else f" ({shown_name(place.file)}:{place.number})"


def _around(text: str, place: int) -> str:
    before, after = text[max(0, place - _CONTEXT) : place], text[place : place + _CONTEXT]
    return f"{before!r} + {after!r}"


def _other(request: GenRequest | ScoreRequest, call: JournalCall) -> str:
    """Names the parameters that differ."""
    if isinstance(request, ScoreRequest):
        return "the choices, or how they are compared"
    recorded = call.sampling or SamplingParams()
    names = [
        f"{name} {getattr(recorded, name)!r} → {getattr(request.sampling, name)!r}"
        for name in SamplingParams.__struct_fields__
        if getattr(recorded, name) != getattr(request.sampling, name)
    ]
    if call.constraint != request.constraint:
        names.append("the constraint")
    return ", ".join(names) or f"the model {call.model!r}, parts of the prompt, or token_healing"
