"""Values of a Hugging Face configuration, checked as they are read. Absent and null mean the default."""

from collections.abc import Mapping
from typing import Any

from ...lang.errors import ModelError

# Any: a configuration is parsed JSON; every value is checked when it is read.
Config = Mapping[str, Any]


def positive_int(config: Config, key: str, default: int | None = None) -> int:
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"configuration: {key}={value!r}; write a whole number of at least 1")
    return value


def positive_number(config: Config, key: str, default: float | None = None) -> float:
    value = _value(config, key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"configuration: {key}={value!r}; write a positive number")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"configuration: {key}={value!r}; write true or false")
    return value


def section(config: Config, key: str) -> dict[str, Any]:
    """A nested object; absent and null are empty."""
    value = _value(config, key, {})
    if not isinstance(value, Mapping):
        raise ModelError(f"configuration: {key}={value!r}; write an object")
    return dict(value)


def _value(config: Config, key: str, default: object) -> object:
    value = config.get(key)
    return default if value is None else value
