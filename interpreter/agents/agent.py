"""The loop of `state.call_tools`, without its waits: sync and async states drive the same steps.

    user turn ─▶ answer ─▶ text? ─▶ done
                   ▲         │ calls
                   │         ▼
                   └─ user turn with the results ◀─ tools, in parallel

Each answer is asked for with the whole conversation, written by the model's chat template with tools, calls and results
in their places. The state itself gets the same as plain turns. A result is content in both, so text in it that spells
a control token stays text.
"""

import importlib.util
import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...lang import ops
from ...lang.agents.dialogue import Dialogue, without_calls
from ...lang.agents.plan import AgentPlan, AgentResult, ToolRun
from ...lang.agents.tool_functions import ToolFunction, result_text
from ...lang.conversations.messages import Message
from ...lang.errors import CapabilityError, ProgramError, shown
from ...lang.prompt import EMPTY, Media, Private, SourceKind
from ...lang.protocol import Backend, Completion, FinishReason
from ...lang.tool_calls import FENCED, MISTRAL, CallFormat, ToolCall, ToolChoice, is_object
from ...lang.tool_constraint import Thinking, tools_constraint
from ..guarantees import schemas
from ..position import Position, steps_since
from ..reasoning import ReasoningTags, split_reasoning
from ..steps import Converse, Keep, Recall, Written
from ..tool_reader import ReadAnswer, read_answer
from ..variables import Binding

if TYPE_CHECKING:
    from ..stream import Stream

MOST_CALLS = 64  # of one answer that are run
_CALLS_SUFFIX = "_calls"
_REQUIRED = "Call a tool first: write the call and nothing else."


@dataclass(frozen=True, slots=True)
class ReadyCall:
    """A call whose arguments fit its tool."""

    tool: ToolFunction[..., Any]
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """Calls of one answer, to be run at the same time. The driver sends back a value or an exception for each."""

    calls: tuple[ReadyCall, ...]


Steps = Generator[Binding | Round, Any, AgentResult]  # Any: values of bindings, outcomes of rounds


class Agent:
    """One `state.call_tools`.

    Args:
        stream: that says and reads.
        plan: what the program asked for.
    """

    def __init__(self, stream: "Stream", plan: AgentPlan) -> None:
        self._stream, self.plan = stream, plan
        self._messages: list[Message] = []
        self._choice = plan.choice
        self._format: CallFormat = FENCED
        self._tags: tuple[str, str] | None = None
        self._tail = ""
        self._runs: list[ToolRun] = []
        self._own_fields = False  # the provider has fields for tools
        self._enforced = False
        self._unenforced = False  # some answer had calls that the provider did not enforce
        self._answer: Completion | None = None  # the last one

    def steps(self) -> Steps:
        """Yields what has to be waited for, and returns the result."""
        for step in range(1, self.plan.max_steps + 1):
            text = yield self._stream.converse(Converse(self.plan.name, self.write, self._take), self.plan.gen)
            answer = self._read(text)
            if not answer.calls:
                if self._choice.mode != "required":
                    return self._finish(answer.content.strip(), step)
                self._messages += [Message("assistant", (answer.content,)), Message("user", (_REQUIRED,))]
                self._say(_REQUIRED)
                continue
            if step < self.plan.max_steps:
                yield from self._results(answer, step)
            self._choice = ToolChoice(parallel=self.plan.choice.parallel)
        return self._finish(None, self.plan.max_steps)

    # -------------------------------------------------------------------------------- answers

    async def write(self, backend: Backend, position: Position) -> Written:
        """Writes the conversation so far for a backend."""
        template = backend.chat_template
        self._own_fields = backend.capabilities.tools
        known = FENCED if self._own_fields else template.call_format
        self._format = FENCED if known is MISTRAL else known  # its mark is a control token of most tokenizers
        self._tags = template.reasoning_tags
        if not self._messages:
            self._messages = _beginning(position)
        definitions = [tool.definition for tool in self.plan.tools]
        conversation = await template.conversation_away(
            self._messages, definitions, call_format=self._format, generation=True
        )
        self._tail = conversation.tail
        if self._own_fields:
            return Written(
                conversation.parts, dialogue=Dialogue(tuple(self._messages), tuple(definitions), self._choice)
            )
        constraint = None
        if "tools" in backend.capabilities.constraints:
            thinking = None if self._tags is None else Thinking(*self._tags, begun=conversation.opens(self._tags))
            constraint = tools_constraint(definitions, self._choice, self._format, thinking=thinking)
        self._enforced = constraint is not None
        return Written(conversation.parts, constraint, template.turn_stops)

    def _take(self, answer: Completion) -> None:
        self._answer = answer
        if self._own_fields and answer.calls:
            self._unenforced = self._unenforced or answer.guarantee != "enforced"
            self._enforced = not self._unenforced

    @property
    def _cut(self) -> bool:
        """True where the last answer ended at max_tokens."""
        return self._answer is not None and self._answer.finish_reason is FinishReason.LENGTH

    def _read(self, text: str) -> ReadAnswer:
        """Finds the calls of the last answer: in the provider's fields, or in its text. Those beyond the first are left
        out where there is to be one."""
        answer = self._read_all(text)
        if self._choice.parallel or len(answer.calls) < 2:
            return answer
        return ReadAnswer(answer.content, answer.calls[:1], cut=False)

    def _read_all(self, text: str) -> ReadAnswer:
        if self._own_fields:
            assert self._answer is not None, "it came before its text"
            calls = self._answer.calls
            cut = self._cut and bool(calls) and not is_object(calls[-1].arguments)
            return ReadAnswer(without_calls(text, calls), calls, cut)
        if self._tags is not None:
            text = split_reasoning(ReasoningTags(*self._tags), self._tail, text, opened=True).answer
        names = [] if self._choice.mode == "none" else [tool.name for tool in self._choice_of_tools()]
        return read_answer(self._format, names, text)

    def _choice_of_tools(self) -> list[ToolFunction[..., Any]]:
        allowed = self._choice.allowed
        return [tool for tool in self.plan.tools if allowed is None or tool.name in allowed]

    # -------------------------------------------------------------------------------- calls

    def _results(self, answer: ReadAnswer, step: int) -> Generator[Binding | Round, Any, None]:
        """Runs the calls of an answer, and says their results."""
        first = len(self._runs) + 1
        calls = tuple(
            ToolCall(
                call.name,
                call.arguments if is_object(call.arguments) else "{}",
                f"call{first + index:05}",
                call.signature,
            )
            for index, call in enumerate(answer.calls)
        )
        runs = yield from self._run(answer, step)
        self._runs += runs
        self._messages.append(Message("assistant", (answer.content,) if answer.content.strip() else (), calls))
        for call, run in zip(calls, runs, strict=True):
            self._messages.append(Message("tool", (run.result,), call_id=call.id, name=run.name))
        self._say("\n".join(self._format.spell_result(run.name, run.result) for run in runs))

    def _run(self, answer: ReadAnswer, step: int) -> Generator[Binding | Round, Any, list[ToolRun]]:
        """Runs the calls of an answer that the journal does not have, all at the same time."""
        ready: list[ReadyCall | str] = [self._ready(call, index) for index, call in enumerate(answer.calls)]
        if answer.cut:
            ready[-1] = "error: the call was cut off at max_tokens; write shorter arguments"
        keys = tuple(f"{call.name} {call.arguments}" for call in answer.calls)
        recalled = yield self._stream.recall(Recall(keys))
        new = [
            index
            for index, (call, (_, known)) in enumerate(zip(ready, recalled, strict=True))
            if isinstance(call, ReadyCall) and known is None
        ]
        outcomes = yield Round(tuple(each for index in new if isinstance(each := ready[index], ReadyCall)))
        told = dict(zip(new, outcomes, strict=True))
        runs: list[ToolRun] = []
        for index, (call, prepared) in enumerate(zip(answer.calls, ready, strict=True)):
            known = recalled[index][1]
            if known is not None:
                run = _recorded(known, call, step)
            elif isinstance(prepared, str):
                run = ToolRun(call.name, _arguments(call), prepared, True, step)
            else:
                run = self._told(call, told[index], step)
            runs.append(run)
        new_runs = tuple((recalled[index][0], keys[index], _record(runs[index])) for index in new)
        if new_runs:
            yield self._stream.keep(Keep(new_runs))
        return runs

    def _ready(self, call: ToolCall, index: int) -> ReadyCall | str:
        """Returns a call with its arguments as values, or what the model is told of wrong ones."""
        if index >= MOST_CALLS:
            return f"error: not run, as one answer may make at most {MOST_CALLS} calls; call it again"
        tool = self.plan.by_name.get(call.name)
        if tool is None:  # only a provider's own fields say such a thing
            return f"error: there is no tool {shown(call.name)}; the tools are {', '.join(self.plan.by_name)}"
        try:
            arguments, wrong = tool.read(call.arguments), ""
        except Exception as error:  # also of the code of a type
            arguments, wrong = {}, _words_of(error) or type(error).__name__
        wrong = wrong or _violations(tool, call.arguments)
        if not wrong:
            return ReadyCall(tool, arguments)
        return _whole(f"error: wrong arguments: {wrong}; call {call.name} again with arguments of its schema")

    def _told(self, call: ToolCall, outcome: object, step: int) -> ToolRun:
        """Returns what the model is told of a value, or of an exception. Raises it where that was asked for."""
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            text, failed = result_text(outcome), False
        except Exception as error:
            if self.plan.on_error == "raise":
                raise
            text, failed = f"error: {type(error).__name__}: {_words_of(error)}", True
        text = _whole(text)
        whole, most = text.encode(), self.plan.max_result_bytes
        cut = len(whole) > most
        if cut:
            text = f"{whole[:most].decode('utf-8', 'ignore')}\n[cut: the first {most} of {len(whole)} bytes]"
        return ToolRun(call.name, _arguments(call), text, failed, step, cut)

    # -------------------------------------------------------------------------------- the state

    def _say(self, text: str) -> None:
        for op in (ops.RoleBegin("user"), ops.ConstantText(text), ops.RoleEnd("user")):
            self._stream.submit(op)

    def _finish(self, answer: str | None, steps: int) -> AgentResult:
        guarantee: Literal["enforced", "validated"] = "enforced" if self._enforced else "validated"
        result = AgentResult(answer, tuple(self._runs), steps, answer is not None and self._cut, guarantee)
        if self.plan.name is not None:
            self._stream.assign(self.plan.name, answer)
            self._stream.assign(self.plan.name + _CALLS_SUFFIX, list(result.calls))
        return result


def _beginning(position: Position) -> list[Message]:
    """Returns the turns before the first answer. Raises ProgramError or CapabilityError for what is no such turn."""
    if not position.turns:
        raise ProgramError("call_tools() answers a conversation, and there is none yet; write s += ul.user(...) first")
    said: list[str] = []
    for prompt in steps_since(EMPTY, position.prompt):
        part = prompt.part
        if isinstance(part, Media):
            raise CapabilityError(f"call_tools() takes conversations of text, and this one has a {part.kind}")
        if isinstance(part, Private):
            raise CapabilityError("call_tools() writes the conversation anew, and cannot keep private() apart in it")
        if part is not None and (prompt.source is None or prompt.source.kind is not SourceKind.SCAFFOLD):
            said += part.text.split()
    contents = [word for turn in position.turns for word in (turn.content or "").split()]
    if not position.owed and "".join(said) != "".join(contents):
        raise ProgramError(
            "call_tools() answers a conversation, and this prompt has text outside of its turns; write it inside of "
            "ul.system(...) or ul.user(...)"
        )
    return [Message(turn.role, (turn.content,) if turn.content else ()) for turn in position.turns]


def _violations(tool: ToolFunction[..., Any], arguments: str) -> str:
    """Says which limits of a tool's types its arguments break, as the validator of answers does; "" for none, or where
    it is not installed. Raises ConstraintError for a pattern that it does not take."""
    if tool.typed_schema is None or importlib.util.find_spec("jsonschema_rs") is None:
        return ""
    schemas.check(tool.typed_schema)
    return "; ".join(schemas.violations(tool.typed_schema, arguments or "{}"))


def _words_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # of its own code
        return "it has no readable message"


def _whole(text: str) -> str:
    """Returns the text with U+FFFD in place of half a surrogate pair, which no prompt and no journal takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _arguments(call: ToolCall) -> Any:  # Any: JSON
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _record(run: ToolRun) -> str:
    return json.dumps([run.result, run.failed, run.cut], ensure_ascii=False)


def _recorded(record: str, call: ToolCall, step: int) -> ToolRun:
    result, failed, cut = json.loads(record)
    return ToolRun(call.name, _arguments(call), result, failed, step, cut)
