"""`sglang.global_config`: settings of the process. The default backend is one; the others belong to runs here."""

from typing import Any

from ...interpreter.run import chosen_backend, set_default_backend
from ...lang.errors import ParameterError, unknown_option
from ...lang.protocol import Backend

# Setting → its only value here, and what to write instead of setting it.
_FIXED: dict[str, tuple[object, str]] = {
    "verbosity": (0, "program.run(..., verbose=True) prints the text of one run"),
    "skip_special_tokens_in_output": (True, "control tokens are never part of a text; leave it out"),
    "spaces_between_special_tokens_in_out": (True, "control tokens are never part of a text; leave it out"),
    "enable_precache_with_tracing": (True, "batches compute what their programs begin with once; leave it out"),
    "enable_parallel_encoding": (True, "branches are computed in parallel; leave it out"),
    "enable_parallel_decoding": (True, "branches run in parallel; leave it out"),
}


class GlobalConfig:
    """SGLang's settings. Reading gives what holds here; setting what cannot be changed raises ParameterError."""

    @property
    def default_backend(self) -> Backend:
        """The backend of programs that are given none."""
        return chosen_backend()

    @default_backend.setter
    def default_backend(self, backend: Backend | None) -> None:
        set_default_backend(backend)

    def __getattr__(self, name: str) -> Any:  # Any: settings are of all types
        if name in _FIXED:
            return _FIXED[name][0]
        raise AttributeError(f"global_config has no {name!r}; it has default_backend, {', '.join(_FIXED)}")

    def __setattr__(self, name: str, value: object) -> None:
        if name == "default_backend":
            object.__setattr__(self, name, value)
        elif name not in _FIXED:
            raise unknown_option("global_config", name, ("default_backend", *_FIXED))
        elif value != _FIXED[name][0]:
            raise ParameterError(f"global_config.{name} is {_FIXED[name][0]!r} here; {_FIXED[name][1]}")


global_config = GlobalConfig()
