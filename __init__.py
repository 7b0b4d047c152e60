"""umbel: programs that call language models many times.

    import umbel as ul

    @ul.function
    def ask(s, question):
        s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=64))

    ul.set_default_backend(ul.Runtime())
    print(ask.run(question="What is an umbel?")["answer"])

Names are imported when they are first used, so `import umbel` is fast and needs no torch.
"""

import importlib
import os
from typing import TYPE_CHECKING

from .lang import __version__ as __version__

# Frameworks keep their names here, as `umbel.dspy`, in a folder of modules that are found under this package.
__path__.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "compat", "names"))

if TYPE_CHECKING:
    from .compiler.graph import Graph as Graph
    from .compiler.program import Program as Program
    from .compiler.program import function as function
    from .compiler.running.compiled import CompiledProgram as CompiledProgram
    from .compiler.running.compiled import load as load
    from .compiler.shared_prefix import Cached as Cached
    from .compiler.tracing.effects import TraceWarning as TraceWarning
    from .fsm.composed.expression import Expression as Expression
    from .fsm.composed.expression import capture as capture
    from .fsm.composed.expression import choice as choice
    from .fsm.composed.expression import json as json
    from .fsm.composed.expression import literal as literal
    from .fsm.composed.expression import recursive as recursive
    from .fsm.composed.expression import regex as regex
    from .fsm.composed.expression import substring as substring
    from .fsm.composed.expression import triggered as triggered
    from .fsm.composed.expression import until as until
    from .interpreter.agents.mcp_tools import McpTools as McpTools
    from .interpreter.agents.mcp_tools import mcp as mcp
    from .interpreter.backends.echo import Echo as Echo
    from .interpreter.backends.echo import FailCall as FailCall
    from .interpreter.backends.echo import Gate as Gate
    from .interpreter.backends.hosted.anthropic.backend import Anthropic as Anthropic
    from .interpreter.backends.hosted.gemini import Gemini as Gemini
    from .interpreter.backends.hosted.litellm import LiteLLM as LiteLLM
    from .interpreter.backends.hosted.ollama import Ollama as Ollama
    from .interpreter.backends.hosted.openai.backend import OpenAI as OpenAI
    from .interpreter.backends.hosted.openai.profiles import Profile as Profile
    from .interpreter.backends.hosted.openrouter import OpenRouter as OpenRouter
    from .interpreter.backends.hosted.sglang.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from .interpreter.backends.hosted.vertexai import VertexAI as VertexAI
    from .interpreter.backends.runtime import Runtime as Runtime
    from .interpreter.batch import Failure as Failure
    from .interpreter.budget import Budget as Budget
    from .interpreter.budget import Price as Price
    from .interpreter.budget import prices as prices
    from .interpreter.data.output import BatchOutput as BatchOutput
    from .interpreter.data.progress import BatchProgress as BatchProgress
    from .interpreter.estimate import Estimate as Estimate
    from .interpreter.evaluation.calibration import Calibration as Calibration
    from .interpreter.evaluation.comparison import Comparison as Comparison
    from .interpreter.evaluation.comparison import compare as compare
    from .interpreter.evaluation.evaluate import evaluate as evaluate
    from .interpreter.evaluation.metrics import contains_match as contains_match
    from .interpreter.evaluation.metrics import exact_match as exact_match
    from .interpreter.evaluation.report import EvaluationReport as EvaluationReport
    from .interpreter.journal.file import JournalWarning as JournalWarning
    from .interpreter.observing.observation import Observation as Observation
    from .interpreter.observing.observation import observe as observe
    from .interpreter.remote_images import fetch_image as fetch_image
    from .interpreter.run import default_backend as default_backend
    from .interpreter.run import flush_cache as flush_cache
    from .interpreter.run import get_server_info as get_server_info
    from .interpreter.run import set_default_backend as set_default_backend
    from .interpreter.vectors import RankedText as RankedText
    from .interpreter.vectors import embed as embed
    from .interpreter.vectors import embed_async as embed_async
    from .interpreter.vectors import rerank as rerank
    from .interpreter.vectors import rerank_async as rerank_async
    from .lang.agents.plan import AgentResult as AgentResult
    from .lang.agents.plan import ToolRun as ToolRun
    from .lang.agents.tool_functions import ToolFunction as ToolFunction
    from .lang.agents.tool_functions import tool as tool
    from .lang.cache_report import CacheCause as CacheCause
    from .lang.cache_report import CacheReport as CacheReport
    from .lang.chat_template import ChatTemplate as ChatTemplate
    from .lang.chat_template import TemplateWarning as TemplateWarning
    from .lang.errors import BackendError as BackendError
    from .lang.errors import BranchCancelledError as BranchCancelledError
    from .lang.errors import BudgetError as BudgetError
    from .lang.errors import CancelledError as CancelledError
    from .lang.errors import CapabilityError as CapabilityError
    from .lang.errors import ConnectionLostError as ConnectionLostError
    from .lang.errors import ConstraintError as ConstraintError
    from .lang.errors import ContextLengthError as ContextLengthError
    from .lang.errors import DeadlineError as DeadlineError
    from .lang.errors import EngineError as EngineError
    from .lang.errors import GraphError as GraphError
    from .lang.errors import GuaranteeError as GuaranteeError
    from .lang.errors import JournalError as JournalError
    from .lang.errors import MissingExtraError as MissingExtraError
    from .lang.errors import ModelError as ModelError
    from .lang.errors import OverloadedError as OverloadedError
    from .lang.errors import ParameterError as ParameterError
    from .lang.errors import ProgramError as ProgramError
    from .lang.errors import RequestError as RequestError
    from .lang.errors import ResultError as ResultError
    from .lang.errors import TemplateError as TemplateError
    from .lang.errors import TraceError as TraceError
    from .lang.errors import UmbelError as UmbelError
    from .lang.errors import VariableError as VariableError
    from .lang.generation import gen as gen
    from .lang.generation import gen_int as gen_int
    from .lang.generation import gen_string as gen_string
    from .lang.generation import select as select
    from .lang.ops import assistant as assistant
    from .lang.ops import assistant_begin as assistant_begin
    from .lang.ops import assistant_end as assistant_end
    from .lang.ops import cache_point as cache_point
    from .lang.ops import exact as exact
    from .lang.ops import greedy_token_selection as greedy_token_selection
    from .lang.ops import image as image
    from .lang.ops import overshoot as overshoot
    from .lang.ops import role as role
    from .lang.ops import separate_reasoning as separate_reasoning
    from .lang.ops import system as system
    from .lang.ops import system_begin as system_begin
    from .lang.ops import system_end as system_end
    from .lang.ops import token_length_normalized as token_length_normalized
    from .lang.ops import unconditional_likelihood_normalized as unconditional_likelihood_normalized
    from .lang.ops import user as user
    from .lang.ops import user_begin as user_begin
    from .lang.ops import user_end as user_end
    from .lang.ops import video as video
    from .lang.partial.parts import Partial as Partial
    from .lang.protocol import Cost as Cost
    from .lang.protocol import Speculation as Speculation
    from .lang.protocol import Usage as Usage
    from .lang.sampling import SamplingParams as SamplingParams
    from .lang.search import Majority as Majority
    from .lang.search import Vote as Vote
    from .lang.search import beam_search as beam_search
    from .lang.search import best_of as best_of
    from .lang.search import self_consistency as self_consistency
    from .lang.search import tree_search as tree_search
    from .lang.search import vote as vote
    from .lang.state import AsyncState as AsyncState
    from .lang.state import AsyncStateGroup as AsyncStateGroup
    from .lang.state import State as State
    from .lang.state import StateGroup as StateGroup

# Public name → the module it lives in. The block above says the same to type checkers; a test compares them.
_HOMES = {
    "compiler.tracing.effects": ("TraceWarning",),
    "compiler.running.compiled": ("CompiledProgram", "load"),
    "compiler.graph": ("Graph",),
    "compiler.shared_prefix": ("Cached",),
    "compiler.program": ("Program", "function"),
    "fsm.composed.expression": (
        "Expression",
        "capture",
        "choice",
        "json",
        "literal",
        "recursive",
        "regex",
        "substring",
        "triggered",
        "until",
    ),
    "interpreter.backends.echo": ("Echo", "FailCall", "Gate"),
    "interpreter.backends.hosted.anthropic.backend": ("Anthropic",),
    "interpreter.backends.hosted.gemini": ("Gemini",),
    "interpreter.backends.hosted.litellm": ("LiteLLM",),
    "interpreter.backends.hosted.ollama": ("Ollama",),
    "interpreter.backends.hosted.openai.backend": ("OpenAI",),
    "interpreter.backends.hosted.openai.profiles": ("Profile",),
    "interpreter.backends.hosted.openrouter": ("OpenRouter",),
    "interpreter.backends.hosted.sglang.endpoint": ("RuntimeEndpoint",),
    "interpreter.backends.hosted.vertexai": ("VertexAI",),
    "interpreter.backends.runtime": ("Runtime",),
    "interpreter.batch": ("Failure",),
    "interpreter.data.output": ("BatchOutput",),
    "interpreter.data.progress": ("BatchProgress",),
    "interpreter.run": ("default_backend", "flush_cache", "get_server_info", "set_default_backend"),
    "interpreter.estimate": ("Estimate",),
    "interpreter.budget": ("Budget", "Price", "prices"),
    "interpreter.evaluation.calibration": ("Calibration",),
    "interpreter.evaluation.comparison": ("Comparison", "compare"),
    "interpreter.evaluation.evaluate": ("evaluate",),
    "interpreter.evaluation.metrics": ("contains_match", "exact_match"),
    "interpreter.evaluation.report": ("EvaluationReport",),
    "interpreter.journal.file": ("JournalWarning",),
    "interpreter.observing.observation": ("Observation", "observe"),
    "interpreter.remote_images": ("fetch_image",),
    "interpreter.vectors": ("RankedText", "embed", "embed_async", "rerank", "rerank_async"),
    "lang.agents.plan": ("AgentResult", "ToolRun"),
    "lang.cache_report": ("CacheCause", "CacheReport"),
    "lang.chat_template": ("ChatTemplate", "TemplateWarning"),
    "lang.errors": (
        "BackendError",
        "BudgetError",
        "BranchCancelledError",
        "CancelledError",
        "CapabilityError",
        "ConnectionLostError",
        "ConstraintError",
        "ContextLengthError",
        "DeadlineError",
        "EngineError",
        "GraphError",
        "GuaranteeError",
        "JournalError",
        "MissingExtraError",
        "ModelError",
        "OverloadedError",
        "ParameterError",
        "ProgramError",
        "RequestError",
        "ResultError",
        "TemplateError",
        "TraceError",
        "UmbelError",
        "VariableError",
    ),
    "lang.generation": ("gen", "gen_int", "gen_string", "select"),
    "lang.ops": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "cache_point",
        "exact",
        "greedy_token_selection",
        "image",
        "overshoot",
        "role",
        "separate_reasoning",
        "system",
        "system_begin",
        "system_end",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
        "user",
        "user_begin",
        "user_end",
        "video",
    ),
    "lang.partial.parts": ("Partial",),
    "lang.protocol": ("Cost", "Speculation", "Usage"),
    "lang.sampling": ("SamplingParams",),
    "lang.search": ("Majority", "Vote", "beam_search", "best_of", "self_consistency", "tree_search", "vote"),
    "lang.state": ("AsyncState", "AsyncStateGroup", "State", "StateGroup"),
    "lang.agents.tool_functions": ("ToolFunction", "tool"),
    "interpreter.agents.mcp_tools": ("McpTools", "mcp"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # strings, as the mapping above shows


_FRAMEWORKS = ("dspy", "langchain")  # modules of compat/names


def __getattr__(name: str) -> object:
    if name in _FRAMEWORKS:
        return importlib.import_module(f".{name}", __name__)
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
