"""RequestValidator: checks a client's request → engine messages, or an error that says what to write.

It finds every mistake of a client before any work: indices are compared with the length of what they
index, texts are tokenized, and the prompt is measured against the context.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import assert_never

import msgspec

from ...lang.caching import COUNTED_MARKS, CacheObject, Caching
from ...lang.errors import CapabilityError, ContextLengthError, ParameterError, RequestError, shown
from ...lang.prompt import (
    MAX_PARTS,
    MAX_PRIVATE,
    Borders,
    Generated,
    Media,
    Part,
    Private,
    Text,
    adapted_salt,
    checked_tenant,
    namespace,
    openings,
    parting,
)
from ...lang.protocol import (
    CacheRequest,
    CreateCache,
    Detokenize,
    Detokenized,
    EmbedRequest,
    ExtendCache,
    FromBackend,
    GenRequest,
    Hint,
    Locate,
    Located,
    Origin,
    RankRequest,
    ReadCaches,
    ScoreRequest,
    Survey,
    Tokenize,
    Tokenized,
)
from ...lang.sampling import SamplingParams
from ...lang.status import MOST_NODES, MOST_SHOWN
from ..core.batch import PICTURE_BASE
from ..core.config import MAX_ENGINE_FRAME, GatewayLimits, PictureLimits
from ..core.messages import (
    NO_ADAPTER,
    EngineChoose,
    EngineEmbed,
    EngineGenerate,
    EnginePrefill,
    EngineScore,
    EngineSurvey,
    Schedule,
)
from ..core.vectors import NO_VECTORS, VectorConfig
from ..multimodal.format import PictureFormat, check_media
from ..tokenizer.prompt import Prompted, PromptEncoder, Showable, media_places, prompts_of, text_of, token_places
from ..tokenizer.tokenizer import CompiledStops, Tokenizer
from .caches import MarkedPrompt, PromptMark, marked_places
from .calls import CacheCall, Client, GenCall, ScoreCall, SurveyCall
from .vectors import EmbedCall, RankCall

Question = Locate | Tokenize | Detokenize  # answered without the engine

_SALT = re.compile(r"[A-Za-z0-9_-]*")
_SEEDS = 2**63
# Texts that models without BOS were trained to see between documents: the nearest thing to a beginning.
_DOCUMENT_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>")


MOST_TOKENIZED = 1 << 22  # characters of one Tokenize, which no context limits
MOST_SCORED = MAX_ENGINE_FRAME // 6  # tokens of the sequences of one request: each has 5 bytes at most in a frame


class RequestValidator:
    """Checks and tokenizes requests for one tokenizer.

    Args:
        ids: ids for engine requests, never the same twice.
        draw_seed: returns a seed for a request without one.
        pictures: the model's picture format, and the limits; None when it reads text only.
        adapters: names, in the order in which the engine has them.
        vectors: how the model makes vectors of texts.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        limits: GatewayLimits,
        *,
        ids: Iterator[int],
        draw_seed: Callable[[], int],
        pictures: tuple[PictureFormat, PictureLimits] | None = None,
        adapters: Sequence[str] = (),
        vectors: VectorConfig = NO_VECTORS,
    ) -> None:
        self._vectors = vectors
        self._adapters = {name: index for index, name in enumerate(adapters)}
        self._encoder = encoder
        self._tokenizer = tokenizer = encoder.tokenizer
        self._limits = limits
        self._ids = ids
        self._draw_seed = draw_seed
        self._pictures = pictures
        self._start = _start_token(tokenizer)
        self.context_length: int | None = None  # known once an engine is ready
        self._stops = CompiledStops()

    def show(self, message: Showable, *, now: float) -> float:
        """Checks a message before its media are decoded → its deadline. Raises an UmbelError."""
        assert self._pictures is not None, "a model that reads text only is shown nothing"
        for prompt in prompts_of(message):
            self._check(message.id, message.origin, prompt)
            check_media([part for part in prompt if isinstance(part, Media)], *self._pictures)
        return self._deadline(message.origin, now)

    # ------------------------------------------------------------------ the three kinds of requests

    def generate(self, request: GenRequest, *, client: Client, now: float) -> GenCall:
        """Raises an UmbelError that says what is wrong with the request."""
        if request.sampling.adapter:
            origin = msgspec.structs.replace(request.origin, adapter=request.sampling.adapter)
            request = msgspec.structs.replace(request, origin=origin)
        self._check_generates()
        self._check(request.id, request.origin, request.prompt)
        self.check_least(request)
        self._check_sampling(request.sampling)
        if request.begun and (not request.stream or request.sampling.n > 1):
            raise ParameterError("begun is for the first chunk of one text; write stream=True and n=1, or leave it out")
        heal = self._heals(request)
        token_ids, schedule, marked = self._encode_marked(request)
        _check_prompt_logprobs(request.sampling.prompt_logprobs_from, token_ids)
        first = request.sampling.seed
        seed = self._draw_seed() if first is None else first
        call = GenCall(
            client,
            request.id,
            tuple(
                EngineGenerate(
                    next(self._ids),
                    token_ids,
                    msgspec.structs.replace(request.sampling, n=1, seed=(seed + index) % _SEEDS),
                    request.stream,
                    schedule,
                    heal=heal,
                    marks=[] if request.begun else None,
                )
                for index in range(request.sampling.n)
            ),
            self._deadline(request.origin, now),
            request.stream,
            self.token_bytes,
            self._stops.of(request.sampling),
            request.constraint,
            request.begun,
        )
        call.marked = marked
        return call

    def prefill(self, call: GenCall) -> EnginePrefill:
        """Makes a hint of the call's prompt, for the engine to compute while the constraint is compiled."""
        message = call.messages[0]
        assert isinstance(message, EngineGenerate), "a GenCall asks for nothing else"
        return EnginePrefill(next(self._ids), message.token_ids, message.schedule)

    def score(self, request: ScoreRequest, *, client: Client, now: float) -> ScoreCall:
        """Raises an UmbelError that says what is wrong with the request."""
        self._check_generates()
        self._check(request.id, request.origin, request.prompt)
        self.check_least(request)
        self._check_choices(request.choices)
        alone, sequences, start = self._choice_tokens(request)
        choices = tuple(tuple(sequence[start:]) for sequence in sequences)
        schedule = self._schedule(request.prompt, request.origin)
        messages: list[EngineScore | EngineChoose] = []
        if request.probability:
            heal, search = self._encoder.ends_in_text(request.prompt), request.probability == "exact"
            ids = list(map(list, choices))
            messages.append(EngineChoose(next(self._ids), alone, ids, start, heal, search, schedule))
        else:
            messages.append(EngineScore(next(self._ids), sequences, start, schedule))
        if request.unconditional:
            beginning = self._beginning("the unconditional log-probability of a choice")
            without = [[beginning, *choice] for choice in choices]
            whole = schedule.private[: schedule.adapter != NO_ADAPTER]  # of the adapter, which computes all of it
            if schedule.private[len(whole) :]:  # the choices are said in the private part
                schedule = msgspec.structs.replace(schedule, private=(*whole, (1, schedule.private[-1][1])))
            messages.append(EngineScore(next(self._ids), without, 1, schedule))
        call = ScoreCall(client, request.id, tuple(messages), self._deadline(request.origin, now), choices)
        if request.caching is not None:
            _, _, call.marked = self._encode_marked(request)
        return call

    def embed(self, request: EmbedRequest, *, client: Client, now: float) -> EmbedCall:
        """Raises an UmbelError that says what is wrong with the request."""
        vectors, name = self._vectors, self._tokenizer.name
        if vectors.labels:
            raise CapabilityError(f"{name} is a classifier and makes no embeddings; write ul.rerank(query, texts)")
        if vectors.refused:
            raise CapabilityError(f"{name} makes no embeddings here: {vectors.refused}; load another model")
        if not 0 <= request.dimensions <= vectors.dimensions:
            raise ParameterError(
                f"dimensions={request.dimensions} is out of range; {name} makes vectors of {vectors.dimensions} numbers"
            )
        closing = self._tokenizer.closing_id
        messages = [
            EngineEmbed(next(self._ids), _closed(ids, closing), request.dimensions, schedule)
            for ids, schedule in self._encode_texts(request, request.texts)
        ]
        return EmbedCall(client, request.id, tuple(messages), self._deadline(request.origin, now), request.first)

    def rank(self, request: RankRequest, *, client: Client, now: float) -> RankCall:
        """Raises an UmbelError that says what is wrong with the request."""
        vectors, name = self._vectors, self._tokenizer.name
        if vectors.refused or not vectors.ranks:
            why = f": {vectors.refused}" if vectors.refused else f" of {vectors.labels} labels" * (vectors.labels > 0)
            raise CapabilityError(
                f"{name} is no reranker{why}; load one, such as a *ForSequenceClassification checkpoint with 1 or 2 "
                "labels, Qwen3-Reranker, or one whose modules.json has a LogitScore"
            )
        messages: list[EngineEmbed | EngineScore] = []
        for ids, schedule in self._encode_texts(request, request.prompts):
            if vectors.answers is None:
                messages.append(EngineEmbed(next(self._ids), ids, 0, schedule))
            else:
                sequences = [[*ids, answer] for answer in vectors.answers]
                messages.append(EngineScore(next(self._ids), sequences, len(ids), schedule))
        return RankCall(client, request.id, tuple(messages), self._deadline(request.origin, now), request.first)

    def _encode_texts(
        self, request: EmbedRequest | RankRequest, texts: Sequence[Sequence[Part]]
    ) -> Iterator[tuple[list[int], Schedule]]:
        """Checks and encodes texts, each with its schedule. Raises an UmbelError that names the text by its place."""
        if not texts:
            raise ParameterError("there is no text; give at least one")
        origin = request.origin
        for index, text in enumerate(texts, request.first):
            self._check(request.id, origin, text)
            for part in text:
                if isinstance(part, Media):
                    raise CapabilityError(f"text {index} holds a picture; vectors are made of text only")
            if not any(part.token_ids if isinstance(part, Generated) else text_of((part,)) for part in text):
                raise ParameterError(f"text {index} is empty; leave it out")
            self._check_least_of(text, f"text {index}")
            yield self._encode(text, origin), self._schedule(text, origin)

    def _check_generates(self) -> None:
        if not self._vectors.generates:
            call = "ul.rerank(query, texts)" if self._vectors.labels else "ul.embed(texts)"
            why = "sees texts both ways" if self._vectors.both_ways else "has no output head"
            raise CapabilityError(
                f"{self._tokenizer.name} {why} and generates no text; write {call}, or load another model"
            )

    def create_cache(
        self, request: CreateCache, *, client: Client, now: float, find: Callable[[], CacheObject | None]
    ) -> CacheCall:
        """Checks and tokenizes a CreateCache. `find`: see CacheCall. Raises an UmbelError."""
        self.check_cache(request)
        self._check_caches()
        self._check(request.id, request.origin, request.prompt)
        if request.minimum < 1:
            raise ParameterError(f"minimum={request.minimum} is no number of tokens; write 1 or more")
        salt = request.origin.salt
        token_ids, (length,) = self._encoder.of(request).encode_marked(request.prompt, (len(request.prompt),))
        if length < request.minimum:
            raise RequestError(
                f"a cache keeps at least {request.minimum} tokens, and the part of this prompt that stays the same "
                f"whatever follows has {length}; give a longer one"
            )
        nothing = SamplingParams(max_tokens=0, temperature=0.0)
        schedule = self._schedule(request.prompt, request.origin)
        prompt = EngineGenerate(next(self._ids), token_ids[:length], nothing, False, schedule)
        call = CacheCall(client, request.id, (prompt,), self._deadline(request.origin, now), find)
        call.marked = MarkedPrompt(salt, (PromptMark(length, 0, request.ttl),), request.name, request.record)
        return call

    def _check_caches(self) -> None:
        if self._vectors.both_ways:
            raise CapabilityError(f"{self._tokenizer.name} sees texts both ways, so no prefix of one can be kept")

    def check_cache(self, request: CacheRequest) -> None:
        """Checks salt, name and TTL. Raises ParameterError."""
        self._check(request.id, request.origin, ())
        longest = self._limits.max_label_length
        if len(request.name) > longest or not (request.name or isinstance(request, ReadCaches)):
            raise ParameterError(f"a name of a cache has 1 to {longest} characters, got {len(request.name)}")
        if isinstance(request, CreateCache | ExtendCache):
            self._check_ttl("", request.ttl)

    def hint(self, hint: Hint) -> EnginePrefill:
        """Checks and tokenizes a hint. Raises an UmbelError when the prefix can never be used."""
        self._check_caches()
        self._check(hint.id, hint.origin, hint.prompt)
        self.check_least(hint)
        if hint.pin is not None and not 0 < hint.pin <= self._limits.longest_pin:
            raise ParameterError(f"pin={hint.pin} is out of range; write seconds, up to {self._limits.longest_pin:g}")
        schedule = self._schedule(hint.prompt, hint.origin)
        return EnginePrefill(next(self._ids), self._encode(hint.prompt, hint.origin), schedule, hint.pin)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token; b"" for ids that only pad the model's vocabulary."""
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""

    def check_length(
        self, call: GenCall | ScoreCall | CacheCall | EmbedCall | RankCall, context_length: int, model: str
    ) -> None:
        """Raises ContextLengthError when a prompt, and one token when one is asked for, do not fit the context."""
        first = call.first if isinstance(call, EmbedCall | RankCall) else None
        for index, message in enumerate(call.messages, first or 0):
            if isinstance(message, EngineEmbed):
                length, room, what = len(message.token_ids), 0, f"text {index}"
            elif isinstance(message, EngineGenerate):
                length, room = len(message.token_ids), min(1, message.sampling.max_tokens)
                what = "the prompt"
            elif isinstance(message, EngineChoose):
                length, room = message.start + max(map(len, message.choices)), 0
                what = "the prompt with its longest choice"
            else:
                assert isinstance(message, EngineScore)
                length, room = max(map(len, message.sequences)), 0
                what = "the prompt with its longest choice" if first is None else f"text {index}"
            if length + room > context_length:
                raise ContextLengthError(
                    f"{what} has {length} tokens and the context of {model} holds {context_length}; "
                    f"shorten it to at most {context_length - room} tokens or load a model with a longer context"
                )

    def check_least(self, message: Prompted) -> None:
        """Raises RequestError for a text that is refused without a look at its tokens: they would take seconds."""
        if isinstance(message, Tokenize):
            characters = sum(len(part.text) for part in message.prompt if isinstance(part, Text))
            if characters > MOST_TOKENIZED:
                raise RequestError(f"the prompt has {characters} characters; at most {MOST_TOKENIZED} are tokenized")
            return
        self._check_least_of(message.prompt, "the prompt")

    def _check_least_of(self, prompt: Sequence[Part], what: str) -> None:
        least = self._encoder.least_tokens(prompt)
        if self.context_length is not None and least > self.context_length:
            raise ContextLengthError(
                f"{what} has at least {least} tokens and the context of {self._tokenizer.name} holds "
                f"{self.context_length}; shorten it or load a model with a longer context"
            )

    # ------------------------------------------------------------------ surveys

    def survey(self, message: Survey, *, client: Client, now: float) -> SurveyCall:
        """Makes the call of a survey. Raises ParameterError for a number out of its range."""
        self._check(message.id, Origin(), ())
        for name, value, low, high in (("most", message.most, 1, MOST_NODES), ("text", message.text, 0, MOST_SHOWN)):
            if not low <= value <= high:
                raise ParameterError(f"survey({name}={value}) is out of range; write {low} to {high}")
        question = EngineSurvey(next(self._ids), message.most, message.text)  # few tokens are shorter than a character
        deadline = now + self._limits.request_timeout
        return SurveyCall(client, message.id, (question,), deadline, message.most, message.text, self._shown_text)

    def _shown_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens of the tree. Pictures, which are ids beyond the vocabulary there, have none."""
        known = [token for token in token_ids if token < PICTURE_BASE]
        return self._text(known, control=True)

    # ------------------------------------------------------------------ questions about tokens

    def answer(self, question: Question) -> FromBackend:
        """Answers from the tokenizer. Raises an UmbelError that says what is wrong with the question."""
        match question:
            case Locate():
                return self._locate(question)
            case Tokenize(id, prompt, origin):
                self._check(id, origin, prompt)
                self.check_least(question)
                if any(isinstance(part, Media) for part in prompt):
                    raise RequestError("pictures have no token ids; leave them out, or count the tokens with a Locate")
                return Tokenized(id, tuple(self._encoder.of(question).encode(prompt)))
            case Detokenize(id, token_ids, control):
                self._check(id, Origin(), ())
                self._check_tokens("token_ids", token_ids)
                return Detokenized(id, self._text(token_ids, control=control))
            case _:
                assert_never(question)

    def _text(self, token_ids: Sequence[int], *, control: bool) -> str:
        names = {token: name.encode() for name, token in self._tokenizer.special_ids.items()} if control else {}
        spelled = ((names.get(token) or self._tokenizer.token_bytes(token)) for token in token_ids)
        return b"".join(spelled).decode("utf-8", "replace")

    def _locate(self, question: Locate) -> Located:
        """Answers a Locate. Raises as `generate`; ParameterError for a token index below 0."""
        prompts = (question.prompt, *question.others)
        for prompt in prompts:
            self._check(question.id, question.origin, prompt)
        self.check_least(question)
        if min(question.tokens, default=0) < 0:
            raise ParameterError(f"tokens={question.tokens} holds {min(question.tokens)}; tokens are counted from 0")
        token_ids, *others = (self._encode(prompt, question.origin) for prompt in prompts)
        private, *of_others = (self._schedule(prompt, question.origin).private for prompt in prompts)
        text, media = text_of(question.prompt), media_places(question.prompt)
        places = token_places(self._tokenizer, text, token_ids, question.tokens, media)
        shared = tuple(
            parting(private, borders, _common(token_ids, other))
            for other, borders in zip(others, of_others, strict=True)
        )
        return Located(question.id, tuple(places), len(token_ids), shared)

    # ------------------------------------------------------------------ tokens

    def _encode(self, prompt: Sequence[Part], origin: Origin) -> list[int]:
        encoder = self._encoder.salted(namespace(origin.salt, prompt))
        return encoder.encode(prompt) or [self._beginning("an empty prompt")]

    def _schedule(self, prompt: Sequence[Part], origin: Origin) -> Schedule:
        """Makes a Schedule without the timeout, which is filled in with the time left when the message is sent.

        What an adapter computes lies in a namespace of its own from the first token on.
        """
        salt = adapted_salt(origin.salt, origin.adapter)
        opened = openings(salt, prompt)
        private: Borders = ((0, salt),) if origin.adapter else ()
        if opened:
            encoder = self._encoder.salted(opened[-1][1])
            _, places = encoder.encode_marked(prompt, [place for place, _ in opened])
            names = [name for _, name in opened]
            # Of two at one place the inner one counts.
            private = tuple((dict(private) | dict(zip(places, names, strict=True))).items())
        return Schedule(
            origin.program_id,
            origin.fork_group,
            origin.salt,
            origin.priority,
            ahead=origin.ahead,
            private=private,
            adapter=self._adapters[origin.adapter] if origin.adapter else NO_ADAPTER,
        )

    def _encode_marked(self, request: GenRequest | ScoreRequest) -> tuple[list[int], Schedule, MarkedPrompt | None]:
        """Encodes a prompt, and turns the places of its marks into numbers of tokens."""
        caching = request.caching
        schedule = self._schedule(request.prompt, request.origin)
        if caching is None:
            return self._encode(request.prompt, request.origin), schedule, None
        self._check_caching(caching, len(request.prompt))
        places = marked_places(caching)
        wanted = sorted({place for pair in places for place in pair})
        token_ids, lengths = self._encoder.of(request).encode_marked(request.prompt, wanted)
        length = dict(zip(wanted, lengths, strict=True))
        ttls = [mark.ttl for mark in caching.marks[-COUNTED_MARKS:]]
        marks = [PromptMark(length[end], length[floor], ttl) for (end, floor), ttl in zip(places, ttls, strict=True)]
        counted = tuple(mark for mark in marks if mark.length >= caching.minimum)
        marked = MarkedPrompt(request.origin.salt, counted)
        return token_ids or [self._beginning("an empty prompt")], schedule, marked

    def _choice_tokens(self, request: ScoreRequest) -> tuple[list[int], list[list[int]], int]:
        """Appends each choice as the program would → tokens of the prompt alone, token sequences, start of the scores.

        prompt            | B O S | T h e | ca |
        prompt + "t"      | B O S | T h e | cat |          the boundary may merge: scoring starts
        prompt + "bin"    | B O S | T h e | ca | bin |     after what prompt and all choices share
                                          ^ start
        """
        alone, sequences = self._encoder.of(request).encode_endings(request.prompt, request.choices)
        if sum(map(len, sequences)) > MOST_SCORED:
            raise RequestError(
                f"{len(sequences)} choices after a prompt of {len(alone)} tokens are more than {MOST_SCORED} tokens "
                "in all; ask for fewer choices at once"
            )
        start = min(_common(alone, sequence) for sequence in sequences)
        if start == 0:  # no BOS, and no token before the choices that all of them share
            beginning = self._beginning("a choice at the very beginning of a prompt")
            return [beginning, *alone], [[beginning, *sequence] for sequence in sequences], 1
        return alone, sequences, start

    def _beginning(self, what: str) -> int:
        if self._start is None:
            raise CapabilityError(
                f"{what} needs a token that begins a text, and {self._tokenizer.name} has none; "
                "begin the prompt with some text"
            )
        return self._start

    # ------------------------------------------------------------------ checks

    def _check(self, label: str, origin: Origin, prompt: Sequence[Part]) -> None:
        limits = self._limits
        for name, text in (("id", label), ("program_id", origin.program_id), ("fork_group", origin.fork_group)):
            if len(text) > limits.max_label_length:
                raise ParameterError(f"{name} has {len(text)} characters; write at most {limits.max_label_length}")
        if len(origin.salt) > limits.max_salt_length or not _SALT.fullmatch(origin.salt):
            raise ParameterError(
                f"salt {origin.salt[:40]!r} is not allowed; write at most {limits.max_salt_length} "
                "letters, digits, - or _"
            )
        if origin.adapter and origin.adapter not in self._adapters:
            known = f"write one of {', '.join(self._adapters)}" if self._adapters else "leave it out"
            raise ParameterError(f"adapter={shown(origin.adapter)} is not loaded; {known}")
        if abs(origin.priority) > limits.max_priority:
            raise ParameterError(
                f"priority={origin.priority} is out of range; write -{limits.max_priority} to {limits.max_priority}"
            )
        timeout = origin.timeout
        if timeout is not None and not 0 <= timeout < float("inf"):
            raise ParameterError(f"timeout={timeout} is not a number of seconds; write at least 0, or None")
        if len(prompt) > limits.max_prompt_parts:
            raise RequestError(f"the prompt has {len(prompt)} parts; at most {limits.max_prompt_parts} are accepted")
        opened = openings(origin.salt, prompt)
        if len(opened) > MAX_PRIVATE:
            raise RequestError(f"the prompt has more than {MAX_PRIVATE} private parts inside of each other; open fewer")
        encoder = self._encoder.salted(opened[-1][1] if opened else origin.salt)
        for part in islice(prompt, encoder.known_parts(prompt), None):  # the others were checked with an earlier prompt
            if isinstance(part, Text):
                _check_text("the prompt", part.text)
            elif isinstance(part, Generated):
                self._check_tokens("prompt", part.token_ids)
            elif isinstance(part, Private):
                checked_tenant(part.tenant)

    def _check_caching(self, caching: Caching, parts: int) -> None:
        places = [mark.place for mark in caching.marks]
        if places != sorted(set(places)):
            raise ParameterError(f"caching.marks: the places {places[:8]} must ascend; write each place once")
        for name, place in [*(("marks", place) for place in places), *(("blocks", place) for place in caching.blocks)]:
            if not 0 < place <= parts:
                raise ParameterError(f"caching.{name}: place {place} is outside of the prompt; write 1 to {parts}")
        for mark in caching.marks:
            self._check_ttl("caching.marks: ", mark.ttl)
        if caching.look_back is not None and not 0 <= caching.look_back <= MAX_PARTS:
            raise ParameterError(f"caching.look_back={caching.look_back} is no number of blocks; write 0 or more")
        if caching.minimum < 1:
            raise ParameterError(f"caching.minimum={caching.minimum} is no number of tokens; write 1 or more")

    def _check_ttl(self, where: str, ttl: float) -> None:
        longest = self._limits.longest_pin
        if not 0 < ttl <= longest:
            raise ParameterError(f"{where}ttl={ttl} is out of range; write seconds, up to {longest:g}")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_tokens("logit_bias", sampling.logit_bias)
        self._check_tokens("stop_token_ids", sampling.stop_token_ids)

    def _heals(self, request: GenRequest) -> bool:
        """Returns whether the prompt ends in text whose last token may grow.

        The boundary after a template's scaffolding, or after generated text, is where the model expects it. An answer
        that may call tools is the one without tools unless it calls one, so it heals only when asked to.
        """
        if request.token_healing and request.constraint is None:
            raise ParameterError(
                "token_healing=True is for constraints (regex, json_schema, grammar); leave it out, or end the prompt "
                "without a space"
            )
        wanted = request.token_healing
        if wanted is None:
            wanted = request.constraint is not None and request.constraint.kind != "tools"
        return wanted and self._encoder.ends_in_text(request.prompt)

    def _check_tokens(self, what: str, token_ids: Sequence[int] | dict[int, float]) -> None:
        if not token_ids:
            return
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._tokenizer.vocab_size:
            wrong = low if low < 0 else high
            raise ParameterError(
                f"{what}: token {wrong} is outside the vocabulary; write 0 to {self._tokenizer.vocab_size - 1}"
            )

    def _check_choices(self, choices: Sequence[str]) -> None:
        limits = self._limits
        if not choices or not all(choices):
            raise ParameterError("choices must be non-empty strings; give at least one")
        if len(choices) > limits.max_choices:
            raise RequestError(f"choices has {len(choices)} texts; at most {limits.max_choices} are accepted")
        longest = max(map(len, choices))
        if longest > limits.max_choice_length:
            raise RequestError(f"choices has a text of {longest} characters; write at most {limits.max_choice_length}")
        for choice in choices:
            _check_text("choices", choice)

    def _deadline(self, origin: Origin, now: float) -> float:
        longest = self._limits.request_timeout
        return now + (longest if origin.timeout is None else min(origin.timeout, longest))


def _start_token(tokenizer: Tokenizer) -> int | None:
    """Returns BOS, or the separator of documents where the model was trained without BOS."""
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    for text in _DOCUMENT_SEPARATORS:
        if text in tokenizer.special_ids:
            return tokenizer.special_ids[text]
    return min(tokenizer.eos_ids, default=None)


def _closed(token_ids: list[int], closing: int | None) -> list[int]:
    """Appends the token that ends a text, unless it is there."""
    return token_ids if closing is None or token_ids[-1] == closing else [*token_ids, closing]


def _check_text(what: str, text: str) -> None:
    """Raises ParameterError for halves of surrogate pairs: they have no bytes, and no tokenizer takes them."""
    if text.isascii():  # known without a look at the characters
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{what} holds {text[error.start]!r} at position {error.start}, which is no character; "
            "decode the input with errors='replace'"
        ) from None


def _check_prompt_logprobs(start: int | None, token_ids: Sequence[int]) -> None:
    """Refuses log-probabilities of a prompt with pictures: their ids are in no vocabulary."""
    if start is None:
        return
    for index in range(len(token_ids) - 1, max(start, 1) - 1, -1):
        if token_ids[index] >= PICTURE_BASE:
            raise RequestError(
                f"prompt_logprobs_from={start} (logprob_start_len): there is a picture after it, whose tokens have no "
                f"log-probabilities; write {index + 1} or more"
            )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
