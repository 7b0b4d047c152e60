"""Characters that stand for a value that is not known yet, inside text that a program builds while it is traced.

    f"Q: {question}"   →   "Q: " + placeholder 0   →   on arrival: the constant "Q: ", then number 0

A placeholder that has been cut, stripped, split, escaped or changed is no longer one, and what is left of it is
recognised, unless it is a character or two from its inside. It is made for that: it has white space at its ends and
inside, letters of both cases, digits, and the punctuation that programs look for; a character that no text has stands
between all of these; its ends are of a kind that no prompt has, either; and a word is repeated that survives where only
ASCII does.
"""

import re
import secrets

from ...lang.errors import UmbelError

_PRIVATE = (0xF0000, 0xFFFFD)  # a plane that no script uses
_WORD_LENGTH = 10
_ENDS = "\u1680"  # white space to Python, and of Ogham inscriptions alone
# What programs strip, split at, replace or escape. Blank lines are what textwrap and inspect rewrite.
_TEMPTATIONS = (
    "\n \t\n", "\r\n", "\n\n\n", "  ", "\t", ", ", ". ", ": ", "; ", "- ", "* ", "# ", '"', "'", "`", "\\n", "\\",
    "/", "|", "&", "<", ">", "=", "+", "~", "^", "@", "!", "?", "$", "%s", "%", "{}", "{", "}", "(", ")", "[", "]",
    "_", "ß", "É", "é", "0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)  # fmt: skip


class Mangled(UmbelError):
    """A text has a part of a placeholder in it. Never leaves the compiler.

    `number`: of the placeholder, where that can be told.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__("a placeholder was cut or changed")
        self.number = number


class Placeholders:
    """Those of one trace: numbers → text, and text → the numbers in it."""

    def __init__(self) -> None:
        low, high = _PRIVATE
        self._mark = chr(low + secrets.randbelow(high - low))
        alphabet = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
        self._word = "".join(secrets.choice(alphabet) for _ in range(_WORD_LENGTH))
        mark, word = self._mark, self._word
        self._tail = f"_{mark}{mark.join(_TEMPTATIONS)}{mark}{word}{mark}{_ENDS}"
        self._whole = re.compile(f"{_ENDS}{mark}([0-9]+){mark}{word}_\\1{re.escape(self._tail)}")
        self._numbered = re.compile(f"{mark}([0-9]+){mark}|{word}_([0-9]+)", re.IGNORECASE)
        self._lowered = word.lower()

    def make(self, number: int) -> str:
        return f"{_ENDS}{self._mark}{number}{self._mark}{self._word}_{number}{self._tail}"

    def touches(self, text: str) -> bool:
        """Whether a placeholder, or anything that is left of one, is in the text."""
        return self._mark in text or _ENDS in text or self._lowered in str.lower(text)

    def split(self, text: str) -> list[str | int]:
        """The constant texts (none is empty) and the placeholders' numbers, in order.

        Raises:
            Mangled: what is no whole placeholder has a part of one.
        """
        if not self.touches(text):
            return [str.__str__(text)] if text else []  # the characters, also of an enumeration's member
        found: list[str | int] = []
        for index, part in enumerate(self._whole.split(text)):
            if index % 2:
                found.append(int(part))
            elif self.touches(part):
                raise Mangled(self.number(part))
            elif part:
                found.append(part)
        return found

    def number(self, text: str) -> int | None:
        """Of the first placeholder in the text, whole or not; None where none can be told."""
        found = self._numbered.search(text)
        return int(found[1] or found[2]) if found is not None else None
