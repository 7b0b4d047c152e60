"""Offers whole programs over HTTP: a graph is kept under a name, then run by name, in one request each.

    PUT    /v1/programs/NAME         the file of a graph, as `umbel compile -o` writes it
    GET    /v1/programs              all of them
    GET    /v1/programs/NAME         parameters as a JSON Schema, variables, digest
    DELETE /v1/programs/NAME
    POST   /v1/programs/NAME/runs    arguments, sampling, budget → variables, result, usage; streamed too

A graph holds no code: reading one runs nothing, and running one opens no file. A run is one message to the gateway,
whatever the number of its calls. A program that was put with the name of a parameter is a model, too (`ProgramModel`).
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec

from ..compiler.operations import Generate
from ..compiler.running.hosted import HostedEvent, HostedRun, RunOutcome, TextPiece, VariableSet
from ..interpreter.body import run_options
from ..interpreter.budget import Budget
from ..lang.errors import ParameterError, shown
from ..lang.protocol import Chunk, Completion, Final, FinishReason, GenRequest, Origin, Usage
from ..lang.sampling import OPTIONS, SamplingParams
from .bodies import Body, Salt, UmbelBody, wrong
from .errors import FieldOf, HttpError, http_error
from .front import Front, ServedModel
from .http import DONE, JSON_OR_EVENTS, Answer, Asked, Endpoint, EventStream, Reply, sse
from .limits import check_constraint
from .program_store import OfferedProgram, check_name

_USUAL = SamplingParams()
_OF_ONE_TEXT = ("n", "stop", "stop_regex", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs_from")
Limit = Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class RunBudget(Body, frozen=True):
    """Limits of one run, over all its calls; see `umbel.Budget`."""

    tokens: Limit | None = None
    calls: Limit | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None


class RunBody(UmbelBody, frozen=True):
    """A run of a program.

    Attributes:
        arguments: by name; `GET /v1/programs/NAME` has their schema. Pictures are base64, or data URLs of it.
        sampling: defaults of the run, with the names of `gen()`: they win over those of the program, and what a `gen`
            of it says itself wins over both.
        budget: what the run may cost.
        stream: pieces are sent as they are generated.
        cache_salt: a namespace of the prefix cache.
        umbel: priority and timeout of the run; its other fields have no effect, with a warning.
    """

    told_as = {"prompt": "arguments"} | {name: f"sampling.{name}" for name in OPTIONS}

    arguments: dict[str, Any] = {}  # Any: JSON, checked by the program
    sampling: dict[str, Any] = {}
    budget: RunBudget | None = None
    stream: bool | None = None
    cache_salt: Salt | None = None


class ProgramUsage(msgspec.Struct, frozen=True):
    """Tokens of all calls of a run. `cached_tokens` are those of prompts whose keys were reused, `cache_write_tokens`
    those that cache points of the program have made the cache keep, and `cache_read_tokens` those that they have found
    kept."""

    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    cache_read_tokens: int
    completion_tokens: int
    total_tokens: int
    calls: int


class ProgramFacts(msgspec.Struct, frozen=True):
    """A program that is offered.

    Attributes:
        parameters: JSON Schema of the arguments.
        variables: name → "text", "texts", "list", "value", or the type that the program asked for.
        digest: SHA-256 of the file.
        bytes: of the file.
        model: whether clients may ask for it as a model, too. `parameter`: takes their message then.
    """

    name: str
    program: str
    created: int
    parameters: dict[str, Any]
    variables: dict[str, str]
    digest: str
    bytes: int
    model: bool = False
    parameter: str = ""
    object: Literal["program"] = "program"


class ProgramList(msgspec.Struct, frozen=True):
    """All programs, by the time when they were put."""

    data: list[ProgramFacts]
    object: Literal["list"] = "list"


class RunAnswer(msgspec.Struct, frozen=True):
    """A run that came to its end.

    Attributes:
        variables: name → text, or a list of texts.
        objects: those whose type makes another object of the text, such as an integer.
        unreadable: name → why its text is no such object: it was cut off, say.
        result: what the program returned.
    """

    id: str
    program: str
    digest: str
    variables: Mapping[str, Any]
    objects: Mapping[str, Any]
    unreadable: Mapping[str, str]
    result: Any
    usage: ProgramUsage
    object: Literal["program.run"] = "program.run"


class Deleted(msgspec.Struct, frozen=True):
    """A program that is gone."""

    name: str
    deleted: bool = True
    object: Literal["program"] = "program"


# ------------------------------------------------------------------------------------------ kept


def _facts(offered: OfferedProgram) -> ProgramFacts:
    graph = offered.graph
    return ProgramFacts(
        name=offered.name,
        program=graph.name,
        created=offered.created,
        parameters=graph.parameters,
        variables=graph.variables,
        digest=graph.digest,
        bytes=graph.size,
        model=bool(offered.parameter),
        parameter=offered.parameter,
    )


async def keep(asked: Asked[bytes]) -> Reply:
    """Keeps the program of a body. `?parameter=NAME` makes it a model that takes messages by that parameter."""
    front, name = asked.front, asked.path["name"]
    check_name(name)
    graph = await front.programs.read(asked.body, source=f"program {name[:64]}")
    for op in (node.op for node in graph.graph.nodes):
        if isinstance(op, Generate) and op.gen.constraint is not None:
            check_constraint(f"the constraint of {shown(op.gen.name)}", op.gen.constraint)
    offered = OfferedProgram(name, graph, front.now(), asked.query.get("parameter", ""))
    front.check_program(offered)
    fresh = await front.programs.keep(offered, asked.body)
    return Reply(_facts(offered), 201 if fresh else 200)


async def list_programs(asked: Asked[None]) -> Reply:
    """Lists the programs."""
    return Reply(ProgramList([_facts(each) for each in asked.front.programs]))


async def describe(asked: Asked[None]) -> Reply:
    """Describes one program."""
    return Reply(_facts(asked.front.programs.get(asked.path["name"])))


async def forget(asked: Asked[None]) -> Reply:
    """Forgets a program. Its runs in flight go on."""
    await asked.front.programs.forget(asked.path["name"])
    return Reply(Deleted(asked.path["name"]))


# ------------------------------------------------------------------------------------------ run


async def run(asked: Asked[RunBody]) -> Answer:
    """Runs a program."""
    body, front = asked.body, asked.front
    offered = front.programs.get(asked.path["name"])
    origin = front.origin(asked.caller, body.umbel, body.cache_salt)
    asked.warnings += place_warnings(origin)
    begun = _begin(
        front,
        offered,
        body.arguments,
        origin,
        sampling=_sampling(body.sampling),
        stream=bool(body.stream),
        budget=_budget(body.budget),
    )
    if body.stream:
        return EventStream(_stream(asked, offered, begun))
    with front.open():
        outcome = await begun.outcome()
    front.note(outcome.usage)
    if outcome.error is None:
        return Reply(_answer(asked, offered, outcome))
    refused = http_error(outcome.error, front.limits.retry_after, body.field_of)
    if refused.status == 500:
        raise outcome.error
    return Reply(_failed(refused, outcome, asked.id), refused.status, refused.headers)


async def _stream(asked: Asked[RunBody], offered: OfferedProgram, begun: HostedRun) -> AsyncGenerator[bytes, None]:
    """Yields an event for each piece and variable, then the whole answer. What fails before the first piece or value is
    a whole answer itself."""
    sent = False
    held: list[bytes] = []  # variables that have an error, before anything was sent
    with asked.front.open():
        async with aclosing(begun.events()) as batches:
            async for events in batches:
                for event in events:
                    if isinstance(event, RunOutcome):
                        asked.front.note(event.usage)
                        if event.error is not None and not sent:
                            raise event.error
                        lines = _last_events(asked, offered, event)
                    else:
                        lines = [sse(_event(event, asked.body.field_of))]
                        if isinstance(event, VariableSet) and event.error is not None and not sent:
                            held += lines
                            continue
                    sent = True
                    for line in held + lines:
                        yield line
                    held = []


def place_warnings(origin: Origin) -> tuple[str, ...]:
    """Returns warnings of fields that place a request in a program of the client: the calls of a run are placed by the
    run. Clients that send these fields with every request may run programs."""
    given = {"program": origin.program_id, "fork_group": origin.fork_group, "ahead": origin.ahead}
    said = "a run is a program of its own, and knows its branches; it changes nothing"
    return tuple(f"umbel.{name}: {said}" for name, value in given.items() if value)


def _begin(
    front: Front,
    offered: OfferedProgram,
    arguments: Mapping[str, Any],
    origin: Origin,
    *,
    sampling: Mapping[str, Any],
    stream: bool,
    budget: Budget | None = None,
) -> HostedRun:
    front.check_open()
    options = {
        "backend": front.backend,
        "sampling": sampling,
        "budget": budget,
        "salt": origin.salt,
        "priority": origin.priority,
        "timeout": origin.timeout,
        "stream": stream,
    }
    return offered.graph.start(arguments, run_options(options))


def _sampling(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns sampling defaults. Keys of a JSON object are texts, and those of `logit_bias` are token ids."""
    biases = given.get("logit_bias")
    if not isinstance(biases, dict):
        return given
    try:
        return {**given, "logit_bias": {int(token): bias for token, bias in biases.items()}}
    except ValueError:
        raise ParameterError("logit_bias must be an object of token ids to numbers") from None


def _budget(given: RunBudget | None) -> Budget | None:
    if given is None:
        return None
    if given == RunBudget():
        raise wrong("budget", "it limits nothing; write tokens, calls or seconds, or leave it out")
    return Budget(tokens=given.tokens, calls=given.calls, seconds=given.seconds)


def _answer(asked: Asked[RunBody], offered: OfferedProgram, outcome: RunOutcome) -> RunAnswer:
    return RunAnswer(
        id=f"run-{asked.id}",
        program=offered.name,
        digest=offered.graph.digest,
        variables=outcome.variables,
        objects=outcome.objects,
        unreadable=outcome.unreadable,
        result=outcome.result,
        usage=_usage(outcome.usage),
    )


def _failed(refused: HttpError, outcome: RunOutcome, request_id: str) -> dict[str, Any]:
    """Returns an error in OpenAI's shape, with what the run had found and spent before it."""
    return {
        **refused.shape("openai", request_id),
        "variables": outcome.variables,
        "usage": _usage(outcome.usage),
    }


def _event(event: HostedEvent, field_of: FieldOf) -> dict[str, Any]:
    if isinstance(event, TextPiece):
        return {"type": "text", "variable": event.variable, "branch": event.branch, "text": event.text}
    assert isinstance(event, VariableSet), "an outcome is the answer"
    named = {"type": "variable", "variable": event.variable, "branch": event.branch}
    if event.error is None:
        return {**named, "value": event.value}
    return {**named, "error": http_error(event.error, field_of=field_of).message}


def _last_events(asked: Asked[RunBody], offered: OfferedProgram, outcome: RunOutcome) -> list[bytes]:
    if outcome.error is None:
        return [sse({"type": "result", **msgspec.structs.asdict(_answer(asked, offered, outcome))}), DONE]
    refused = http_error(outcome.error, field_of=asked.body.field_of)
    return [sse({"type": "error", **_failed(refused, outcome, asked.id)})]


def _usage(usage: Usage) -> ProgramUsage:
    return ProgramUsage(
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.cache_write_tokens,
        usage.cache_read_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        usage.calls,
    )


# ------------------------------------------------------------------------------------------ as a model


class ProgramModel:
    """Answers one message by a program, with the methods by which a front answers requests, so a dialect asks it in
    place of the front.

    Sampling parameters that a client gives hold for the run: they win over those of the program, and what a `gen` of it
    says itself wins over both. `max_tokens` is of each `gen` then, not of the answer.

    Args:
        model: whose `program` is not "".
        message: text of the last message of the user.
        given: names of the sampling parameters that the client gives, whatever their values.

    Raises:
        HttpError: 404 for a program that is gone.
    """

    def __init__(self, front: Front, model: ServedModel, message: str, given: Collection[str]) -> None:
        self._front = front
        self._given = given
        self._offered = front.programs.get(model.program)
        self._message = message

    async def events(self, requests: Sequence[GenRequest]) -> AsyncGenerator[tuple[int, Chunk | Final], None]:
        """Yields the events of one request, whose prompt is not looked at: chunks of the answer when it is streamed,
        then a Final with all of it and the usage of all calls.

        Raises:
            ParameterError: a field that a program cannot honour.
            The error of the program.
        """
        (request,) = requests
        begun = _begin(
            self._front,
            self._offered,
            {self._offered.parameter: self._message},
            request.origin,
            sampling=self._sampling(request.sampling),
            stream=request.stream,
        )
        async with aclosing(begun.answer()) as pieces:
            async for piece in pieces:
                if isinstance(piece, str):
                    if request.stream:
                        yield 0, Chunk(request.id, 0, piece)
                    continue
                self._front.note(piece.usage)
                if piece.error is not None:
                    raise piece.error
                completion = Completion(piece.text, (), 0, piece.text, FinishReason.STOP)
                yield 0, Final(request.id, (completion,), piece.usage)

    async def finals(self, requests: Sequence[GenRequest]) -> list[Final]:
        """Answers one request that is not streamed."""
        async with aclosing(self.events(requests)) as events:
            return [event async for _, event in events if isinstance(event, Final)]

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        """Returns the parameters that the client gives. Raises ParameterError for those of one text, which a program
        is not."""
        for name in _OF_ONE_TEXT:
            if getattr(params, name) != getattr(_USUAL, name):
                raise ParameterError(
                    f"{name}: {self._offered.name!r} is a program, which may generate many texts; leave it out"
                )
        return {name: getattr(params, name) for name in self._given if name not in _OF_ONE_TEXT}


ENDPOINTS = (
    Endpoint(
        "PUT",
        "/v1/programs/{name}",
        keep,
        "Keep a program: the body is the file of a graph",
        answer=ProgramFacts,
        statuses=(200, 201),
        errors=(409,),
        admin=True,
        raw=True,
        query={"parameter": str},
    ),
    Endpoint("GET", "/v1/programs", list_programs, "List the programs", answer=ProgramList),
    Endpoint("GET", "/v1/programs/{name}", describe, "Describe a program", answer=ProgramFacts, errors=(404,)),
    Endpoint("DELETE", "/v1/programs/{name}", forget, "Forget a program", answer=Deleted, errors=(404,), admin=True),
    Endpoint(
        "POST",
        "/v1/programs/{name}/runs",
        run,
        "Run a program",
        body=RunBody,
        answer=RunAnswer,
        media=JSON_OR_EVENTS,
        errors=(404, 422, 504),
    ),
)
