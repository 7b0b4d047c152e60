"""A collection of real and of nasty expressions: their languages are those of `re`, or they are refused."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import regex
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import Limits, Unsupported
from umbel.fsm.language import Grammar
from umbel.fsm.regex.parser import parse_regex

from ..matcher import matches
from ..sampler import changed, sampled

COLLECTION = Path(__file__).resolve().parents[4] / "shared" / "constrained" / "regexes.jsonl"
REFUSED = {
    "word_boundary": ("\\b", "position 0"),
    "backref": ("backreference", "position 10"),
    "lookbehind": ("lookbehind", "position 2"),
    "possessive_atomic": ("atomic group", "position 0"),
    "posix_class": ("[:alpha:]", "position 1"),
}
# re backtracks on these: its answer takes time that doubles with every character.
BACKTRACKS = {"nested_plus", "alt_overlap", "xxy", "ws_trim", "many_opt"}

pytestmark = pytest.mark.skipif(not COLLECTION.exists(), reason="no collection of expressions beside the checkout")


def collection() -> list[dict[str, Any]]:
    return [json.loads(line) for line in COLLECTION.read_text().splitlines()] if COLLECTION.exists() else []


@pytest.mark.parametrize("entry", collection(), ids=lambda entry: entry["id"])
def test_the_language_is_that_of_re(entry: dict[str, Any]) -> None:
    pattern = entry["pattern"]
    if entry["id"] in REFUSED:
        with pytest.raises(Unsupported) as refusal:
            parse_regex(pattern)
        assert (refusal.value.keyword, refusal.value.where) == REFUSED[entry["id"]]
        return
    compiled = regex.compile(pattern) if "unicode_prop" in entry else re.compile(pattern)
    language = resolve(Grammar(parse_regex(pattern)), Limits()).start
    for text in entry["match"]:
        assert matches(language, text.encode()), text
    for text in entry["nomatch"]:
        assert not matches(language, text.encode()), text
    dice = random.Random(entry["id"])
    for _ in range(40):
        text = sampled(language, dice, 8).decode()
        if entry["id"] in BACKTRACKS and len(text) > 14:
            continue
        assert compiled.fullmatch(text), text
        other = changed(text, dice)
        assert bool(compiled.fullmatch(other)) == matches(language, other.encode()), other
