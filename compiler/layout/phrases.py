"""What text says about its own place: words, signs and shapes of lines that tie it to its neighbours.

Judged generously: a sentence that is tied by mistake stays where its author put it. The words are English, and
a few Chinese ones; of other languages only signs, labels, lists and tags are seen.
"""

import re

_THING = r"(?:text|passage|paragraph|sentence|line|question|document|article|example|message|section|part|input|list)s?"

# "as said above": what is meant stands in front.
BACKWARD = re.compile(
    r"\b(?:above|previous|previously|preceding|prior|earlier|aforementioned|foregoing|said before|so far|"
    rf"you (?:have )?(?:just )?(?:read|seen|been given)|just (?:read|given|seen)|(?:this|that|these|those) {_THING})\b"
    "|上述|以上|上面|前面|前文",
    re.IGNORECASE,
)
# "the following": what is meant stands behind.
FORWARD = re.compile(
    rf"\b(?:following|follows|below|underneath|beneath|next {_THING}|after this|(?:comes|given|listed|shown) next)\b"
    "|以下|下面|下列|如下",
    re.IGNORECASE,
)
# What is meant is a place in the order of all of it: nothing may move.
ORDER = re.compile(
    rf"\b(?:(?:first|second|third|last|latter|former|final) {_THING}|first (?:two|three|few)|"
    rf"(?:top|bottom|beginning|start|end) of (?:this|the|my|your) (?:prompt|{_THING})|in (?:this|the given) order|"
    r"respectively|after that|before that|(?:from|until|till|up to) (?:now|here|this (?:point|line))|end of the \w+)\b",
    re.IGNORECASE,
)
# How a sentence begins that goes on with the one before.
CONTINUES = re.compile(
    r"(?:This|That|These|Those|It|Its|They|Their|Them|He|His|She|Her|Then|Also|However|Otherwise|Next|Finally|Lastly|"
    r"Therefore|Thus|Hence|So|And|But|Or|Nor|Yet|Because|Since|Such|Both|Each|Either|Neither|Again|Instead|Likewise|"
    r"Afterwards|Meanwhile|Furthermore|Moreover|Similarly|If so|If not|Do so|In that case|In this case|For example|"
    r"For instance|Second|Secondly|Third|Thirdly)\b|[a-z,;)\]}]"
)
# Behind a sentence with a value, these mean the value as a rule: "say why it is so".
PRONOUN = re.compile(
    r"\b(?:it|its|they|them|their|theirs|this|these|those|he|she|him|her|his|hers|such)\b", re.IGNORECASE
)
LABEL = re.compile(r"(?:[-*#> \t]*)(?:\*\*)?([A-Za-z][\w /'-]{0,30})(?:\*\*)?[ \t]*:")  # "Question:", "## Input:"
LIST_ITEM = re.compile(
    r"[ \t]*(?:[-*•+]|\(?\d{1,3}[.):]|\(?[a-zA-Z][.)])[ \t]+\S|[ \t]*(?:First|Step \d+)\b", re.IGNORECASE
)
HEADING = re.compile(r"[ \t]*(#{1,6})[ \t]+\S")
SEPARATOR = re.compile(r"[ \t]*(?:[-=_*#~]{3,}|\|)[ \t]*$")
FENCE = re.compile(r'```|"""|\'\'\'|~~~')
TAG = re.compile(r"<(/?)([A-Za-z][\w.-]*)(?:\s[^<>]*)?>|\[(/?)([A-Z]{3,})\]")
OPENING, CLOSING = "([{“«「『（【", ")]}”»」』）】"
TERMINAL = re.compile(r"[.!?。！？…][\"'”’)\]*_]*$")

# Behind these a new sentence begins. A capital, a quote or a hole must follow, so that "e.g. this" stays whole.
SENTENCE_END = re.compile(
    r"(?<![A-Z])(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\b[DM]r)(?<!\bvs)(?<!\bNo)[.!?]+[\"'”’)\]*_]*[ \t]+"
    r"|[。！？]+[”’」』）]*"
)
