"""SGLang's programs: `import umbel.compat.sglang as sgl` in place of `import sglang as sgl`.

The names, parameters and modules are SGLang's (`umbel.compat.sglang.lang.ir` for `sglang.lang.ir`), and all of them do
what umbel does: this package maps, and computes nothing. What has no counterpart is refused, with the name to write.
"""

from .global_config import global_config as global_config
from .lang.api import (
    Engine,
    Runtime,
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from .lang.backend.anthropic import Anthropic
from .lang.backend.litellm import LiteLLM
from .lang.backend.openai import OpenAI
from .lang.backend.runtime_endpoint import RuntimeEndpoint
from .lang.backend.vertexai import VertexAI
from .lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

__all__ = [
    "Anthropic",
    "Engine",
    "LiteLLM",
    "OpenAI",
    "Runtime",
    "RuntimeEndpoint",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
