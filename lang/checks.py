"""Checks of single arguments: what was given → the plain value that it stands for, or an error that names it.

    integer("n", value, 1, 128)     an int in a range; numpy's integers too, no bool
    number("top_p", value, 0, 1)    an int or float in a range; numpy's too; no NaN
    seconds("timeout", value)       a number above 0
    switch("stream", value)         True or False
    text("salt", value, 128)        a string, of at most so many characters
    path("journal", value)          the path of a file, as a string
    output("--svg", value)          the same where a file can be made, before anything is computed or paid for it
    is_one_file(path, other)        whether one would be written over the other
    one_of("mode", value, MODES)    one of some strings
    members("stop", value, 16)      the members of an iterable, of which no more than that are taken
    entries("bias", value, 300)     the members of a mapping
    record(profile)                 a dataclass of plain values, by its annotations

Values come from outside: subclasses of int, float and str whose methods are their own become plain ones by the methods
of the base, an iterable may have no end, and code of objects may raise whatever it likes.
"""

import contextlib
import difflib
import numbers
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import ParameterError, UmbelError, shown

LARGEST_ID = 2**31 - 1  # of a token; no vocabulary is larger, and the engine keeps ids in 32 bits
LONGEST_PATH = 4096  # characters
LONGEST_SALT = 128  # characters; also of the name of a tenant
LONGEST_SECONDS = 1e9  # about 31 years: beyond it clocks overflow


def as_integer(value: object) -> int | None:
    """The plain int that a value is, or None. A bool is none, and neither is an array of one number."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int.__index__(value)
    return _converted(int, value) if isinstance(value, numbers.Integral) else None


def as_number(value: object) -> int | float | None:
    """The plain int or float that a value is, or None."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int | numbers.Integral):
        return as_integer(value)
    return _converted(float, value) if isinstance(value, numbers.Real) else None


def _converted(kind: Any, value: object) -> Any:  # Any: int or float, and a number of it
    try:
        result = kind(value)
    except Exception:  # of the number's own code
        return None
    return result if type(result) is kind else None


def plain(value: str) -> str:
    """A str without a subclass around it."""
    return value if type(value) is str else str.__str__(value)


def plain_number(value: Any) -> Any:  # Any: whatever was given
    """A number without a subclass around it, numpy's included; anything else as it is."""
    found = as_number(value)
    return value if found is None else found


def plain_value(value: Any) -> Any:
    """A number or a string without a subclass around it; anything else as it is."""
    return plain(value) if isinstance(value, str) else plain_number(value)


def integer(name: str, value: object, low: int, high: int, instead: str = "") -> int:
    """An integer from `low` to `high`.

    Args:
        name: of the parameter.
        instead: what to write, in place of the range.

    Raises:
        ParameterError: anything else; the message names the parameter.
    """
    found = as_integer(value)
    if found is None:
        raise ParameterError(_wrong_kind(name, "an integer", value, instead))
    if not low <= found <= high:
        raise ParameterError(f"{name}={shown(found)} is out of range; write {instead or f'from {low} to {high}'}")
    return found


def number(name: str, value: object, low: float, high: float, instead: str = "") -> int | float:
    """A number from `low` to `high`. Raises as `integer` does."""
    found = as_number(value)
    if found is None:
        raise ParameterError(_wrong_kind(name, "a number", value, instead))
    if not low <= found <= high:  # NaN is not
        raise ParameterError(f"{name}={shown(found)} is out of range; write {instead or f'{low} to {high}'}")
    return found


def seconds(name: str, value: object, low: float = 0.0, high: float = LONGEST_SECONDS, instead: str = "") -> float:
    """A number of seconds above `low` and up to `high`. Raises as `integer` does."""
    remedy = instead or f"a number of seconds above {low:g} and up to {high:g}"
    found = number(name, value, low, high, remedy)
    if found == low:
        raise ParameterError(f"{name}={shown(found)} is out of range; write {remedy}")
    return float(found)


def switch(name: str, value: object) -> bool:
    """True or False, and nothing that counts as one. Raises as `integer` does."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be True or False, got {shown(value)}")
    return value


def text(name: str, value: object, most: int, instead: str = "a non-empty string", *, empty: bool = False) -> str:
    """A string of at most `most` characters; not the empty one, unless `empty`. Raises as `integer` does."""
    if not isinstance(value, str) or not (empty or plain(value)):
        raise ParameterError(f"{name}={shown(value)}; write {instead}")
    found = plain(value)
    if len(found) > most:
        raise ParameterError(f"{name} has {len(found)} characters; write at most {most}")
    return found


def path(name: str, value: object) -> str:
    """The path of a file, as a string: no number, which would be a file that is open. Raises as `integer` does."""
    try:
        found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        os.fsencode(found or "")  # half of a surrogate pair stands in no name
    except Exception:  # of the object's own code
        found = None
    if not isinstance(found, str) or not plain(found) or "\0" in found or len(found) > LONGEST_PATH:
        raise ParameterError(f"{name}={shown(value)}; write a path, a string of at most {LONGEST_PATH} characters")
    return plain(found)


def output(name: str, value: str | os.PathLike[str]) -> None:
    """Raises ParameterError for the path of a file that cannot be made: a folder, or in a folder that is not there."""
    file = Path(path(name, value))
    if file.is_dir():
        raise ParameterError(f"{name} {shown(str(file))} is a folder; write the path of a file in it")
    if not file.parent.is_dir():
        raise ParameterError(f"{name} {shown(str(file))}: {file.parent} is no folder; make it, or write another path")


def is_one_file(one: str, other: str) -> bool:
    """Returns whether two paths name one file, or will when it is made. A path that no file can have names none."""
    with contextlib.suppress(OSError, ValueError):
        if os.path.realpath(one) == os.path.realpath(other):
            return True
        return os.path.samefile(one, other)
    return False


def one_of(name: str, value: object, known: Collection[str]) -> str:
    """Checks that a value is one of some strings. Raises as `integer` does; the message has the nearest of them."""
    if isinstance(value, str) and plain(value) in known:
        return plain(value)
    near = difflib.get_close_matches(plain(value)[:64], known, n=1) if isinstance(value, str) else []
    remedy = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(map(repr, known))}"
    raise ParameterError(f"{name}={shown(value)} is not known; {remedy}")


def instance(name: str, value: object, kinds: Any) -> None:  # Any: a class, or a union of classes
    """Raises ParameterError for a value of none of the kinds."""
    if not isinstance(value, kinds):
        wanted = " or ".join(part.__name__ for part in (get_args(kinds) or (kinds,))).replace("NoneType", "None")
        raise ParameterError(f"{name} must be {wanted}, got {type(value).__name__} {shown(value)}")


def is_function(value: object) -> bool:
    """Whether a value is called as a function is: no class, and no generic alias of one."""
    return callable(value) and not isinstance(value, type) and get_origin(value) is None


def function(name: str, value: object) -> None:
    """Raises ParameterError for what is no function."""
    if not is_function(value):
        raise ParameterError(f"{name} must be a function, got {type(value).__name__} {shown(value)}")


def length(name: str, value: object, wanted: str) -> int | None:
    """The number of members, or None where it is not known: a generator has none. Raises as `members` does."""
    try:
        return len(value) if isinstance(value, Sized) else None
    except Exception as error:  # of the collection's own code, or it is longer than any memory
        raise ParameterError(
            f"{name}: the length of {type(value).__name__} cannot be known ({type(error).__name__}); write {wanted}"
        ) from error


def begun(name: str, value: Iterable[Any], wanted: str) -> Iterator[Any]:
    """Starts iterating. Raises as `members` does; an error in the middle of it is the caller's own."""
    try:
        return iter(value)
    except Exception as error:  # of the iterable's own code
        raise ParameterError(f"{name} must be {wanted}; reading it raised {type(error).__name__}") from error


def members(name: str, value: object, most: int, wanted: str) -> tuple[Any, ...]:
    """Lists the members of an iterable that is no text and no mapping; takes at most `most` of one without an end.

    Args:
        wanted: what to write: "a list of strings".

    Raises:
        ParameterError: no such iterable, one that has more, or one whose own code fails.
    """
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ParameterError(f"{name} must be {wanted}, got {type(value).__name__} {shown(value)}")
    return _first(name, value, most, wanted)


def entries(name: str, value: object, most: int, wanted: str) -> dict[Any, Any]:
    """Copies a mapping to a dict. Raises as `members` does."""
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name} must be {wanted}, got {type(value).__name__} {shown(value)}")
    if type(value) is dict:
        if len(value) > most:
            raise ParameterError(f"{name} has {len(value)} entries; at most {most} are allowed")
        return dict(value)
    try:
        return {key: value[key] for key in _first(name, value, most, wanted)}
    except UmbelError:
        raise
    except Exception as error:  # of the mapping's own code
        raise ParameterError(f"{name} must be {wanted}; reading it raised {type(error).__name__}") from error


def record(given: object) -> None:
    """Checks the fields of a dataclass of plain values by what is annotated: bool, int, str, Literal, frozenset[str],
    an enumeration, and unions of these with None.

    Raises:
        ParameterError: a value of another type, or an integer that is not -1 to 2**31 - 1.
    """
    owner: Any = type(given)  # Any: a type is hashable, which mypy does not see of a type[object]
    for name, annotation in _annotations(owner).items():
        _field(f"{owner.__name__}(): {name}", getattr(given, name), annotation)


@lru_cache(maxsize=64)
def _annotations(owner: Any) -> Mapping[str, Any]:
    return get_type_hints(owner)


def _field(name: str, value: object, annotation: Any) -> None:  # Any: an annotation
    optional = [part for part in get_args(annotation) if part is not type(None)]
    if type(None) in get_args(annotation):
        if value is not None:
            _field(name, value, optional[0])
    elif annotation is bool:
        switch(name, value)
    elif annotation is int:
        integer(name, value, -1, LARGEST_ID)
    elif annotation is str:
        text(name, value, 1024, "a string", empty=True)
    elif get_origin(annotation) is Literal:
        one_of(name, value, get_args(annotation))
    elif get_origin(annotation) is frozenset:
        if not isinstance(value, frozenset) or not all(isinstance(member, str) for member in value):
            raise ParameterError(f"{name} must be a frozenset of strings, got {type(value).__name__} {shown(value)}")
    else:
        instance(name, value, annotation)


def _first(name: str, value: Iterable[Any], most: int, wanted: str) -> tuple[Any, ...]:
    try:
        found = tuple(islice(iter(value), most + 1))
    except UmbelError:
        raise
    except Exception as error:  # of the iterable's own code
        raise ParameterError(f"{name} must be {wanted}; reading it raised {type(error).__name__}") from error
    if len(found) > most:
        raise ParameterError(f"{name} has more than {most} entries; at most {most} are allowed")
    return found


def _wrong_kind(name: str, wanted: str, value: object, instead: str) -> str:
    if instead:
        return f"{name}={shown(value)} is not {wanted}; write {instead}"
    return f"{name} must be {wanted}, got {type(value).__name__} {shown(value)}"
