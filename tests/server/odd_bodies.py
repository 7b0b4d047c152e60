"""Bodies that no client should send, and some will: an odd value in the place of each field of each endpoint.

Values are bytes of JSON, so that what `json.dumps` would never write is among them.
"""

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import umbel as ul
from umbel.compiler.files import serialise
from umbel.lang.prompt import Text
from umbel.lang.protocol import Tokenize
from umbel.server.http import Endpoint
from umbel.server.limits import HttpLimits
from umbel.srt.in_process import LocalBackend

from .client import AsgiClient

_HERE = "\x00here\x00"
_MARK = json.dumps(_HERE).encode()

_NUMBERS = (
    "0", "1", "-1", "-0", "-0.0", "2", "3", "7", "16", "17", "20", "21", "64", "65", "100", "101", "127", "128", "129",
    "255", "256", "257", "1023", "1024", "1025", "4096", "8192", "65535", "65536", "1048576", "1048577", "2147483647",
    "2147483648", "4294967295", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "-2147483649", "-9223372036854775808", "-9223372036854775809",
    "0.5", "1.0", "1.5", "-0.5", "1e-320", "1e-38", "1e18", "1e308", "-1e308", "1e309", "1e999", "-1e999", "1e-999",
    "NaN", "Infinity", "-Infinity", "01", "+1", ".5", "1.", "0x10", "1_000", "1e", "9" * 400, "-" + "9" * 400,
    "9" * 4000, "0." + "9" * 4000, "1e" + "9" * 400,
)  # fmt: skip
_WORDS = ("null", "true", "false", "True", "None", "undefined", "nul", "", " ", ",", "}", "]", "//", "'x'", "`", "\x00")
_TEXTS = (
    "", " ", "x", "0", "1", "-1", "true", "null", "NaN", "1e999", "\n", "\r\n", "\t", "\x00", "\x7f", "\x1b[2J",
    "\u00e9", "e\u0301", "\u202e", "\ufeff", "\ufffd", "\ufffe", "\U0010ffff", "\U0001f600", "\u2028", "a" * 256,
    "a" * 257, "a" * 4096, "a" * 4097, "a" * 65537, "\u00e9" * 70000, "{", "}", "[", "(", "((((((((", "(" * 3000, "\\",
    "*", "[a-", "(a+)+b", "[ab]*a[ab]{16}", "(.{0,50},){0,50}", "a{1,99999}", "(?=x)", "\\1", "(?P<n>x)", ".*", "$ref",
    "{{ x }}", "{% for x in y %}", "%s", "${x}", "../../etc/passwd", "/etc/passwd", "file:///etc/passwd",
    "http://127.0.0.1:1/x.png", "data:image/png;base64,", "data:image/png;base64,AAAA", "data:,x", "javascript:x",
    "<script>", "' OR 1=1 --", "<bos>", "<eos>", "<|im_end|>", "<start_of_turn>", "oracle", "system", "user",
    "assistant", "tool", "auto", "none", "required", "function", "json_schema", "Bearer x", "default", "a/b", "a b",
)  # fmt: skip
_ESCAPES = (
    b'"\\ud800"', b'"\\udc00"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\x41"', b'"\\"', b'"x',
    b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe2\x82"', b'"\n"', b'"\x00"',
)  # fmt: skip
_LISTS = (
    b"[]", b"[[]]", b"[null]", b"[0]", b"[1]", b"[-1]", b"[2147483648]", b'[""]', b'["x"]', b'["x",1]', b'["x","x"]',
    b"[true]", b"[1.5]", b"[{}]", b"[[1],[2]]", b"[[1],2]", b"[1,]", b"[,1]", b"[1 2]", b"[[[[[[[[1]]]]]]]]",
    b"[" + b",".join([b'"x"'] * 17) + b"]", b"[" + b",".join([b"1"] * 301) + b"]",
    b"[" + b",".join([b'"x"'] * 1025) + b"]", b"[" + b",".join([b"{}"] * 10_001) + b"]",
    b'["t","x"]', b'[["t","x"]]', b'[["t","x",true],["t"]]', b'[["g","",[-1]]]', b'[["m","image","x","AAAA"]]',
)  # fmt: skip
_OBJECTS = (
    b"{}", b'{"":0}', b'{"x":1}', b'{"0":0}', b'{"0":100}', b'{"0":101}', b'{"-1":1}', b'{"99999999999":1}',
    b'{"0":NaN}', b'{"x":1,"x":2}', b'{"type":"x"}', b'{"type":"text"}', b'{"type":1}', b'{"type":null}',
    b'{"type":"function"}', b'{"type":"function","function":{}}', b'{"type":"json_schema"}',
    b'{"type":"json_schema","json_schema":{"name":"x","schema":{"$ref":"#"}}}', b'{"role":"user"}',
    b'{"role":"wizard","content":"x"}', b'{"role":"user","content":null}', b'{"include_usage":1}',
    b'{"$ref":"#"}', b'{"allOf":[{"$ref":"#"}]}', b'{"type":"object","properties":{"a":{"$ref":"#"}}}',
    b'{"enum":[]}', b'{"pattern":"("}', b'{"minimum":5,"maximum":1}', b'{"x"}', b'{"x":}', b"{1:2}", b'{"\\ud800":1}',
    b'{"__proto__":{}}', b"{" + b",".join(b'"%d":0' % n for n in range(301)) + b"}",
    b"{" + b",".join(b'"k%d":"v"' % n for n in range(2000)) + b"}",
)  # fmt: skip
_DEEP = (
    b"[" * 65 + b"]" * 65, b"[" * 900 + b"]" * 900, b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 65 + b"1" + b"}" * 65, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
)  # fmt: skip

VALUES: tuple[bytes, ...] = (
    *(each.encode() for each in (*_NUMBERS, *_WORDS)),
    *(json.dumps(each, ensure_ascii=False).encode() for each in _TEXTS),
    *_ESCAPES,
    *_LISTS,
    *_OBJECTS,
    *_DEEP,
)

# A few megabytes each: for one place, not for all.
LARGE: tuple[bytes, ...] = (
    b"[" + b",".join([b'"x"'] * 1_000_000) + b"]",
    b"[" + b",".join([b"1"] * 1_048_577) + b"]",
    b'"' + b"a" * 8_000_000 + b'"',
    b"{" + b",".join(b'"%d":0' % n for n in range(200_000)) + b"}",
)

_SHORT = {"temperature": 0, "ignore_eos": True}
_OURS = {"umbel": {"program": "p", "fork_group": "g", "ahead": 3, "priority": 1, "timeout": 30}, "cache_salt": "s"}
_TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {"q": {"enum": [1]}}}}
_ANTHROPIC_TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
_QUESTION = msgspec.msgpack.encode(Tokenize("q", (Text("hello"),)))
_SAMPLING = {"max_new_tokens": 3, "stop": ["zz"], "logit_bias": {"97": 1.5}, "regex": "[a-z]+", **_SHORT}

# (method, path) → bodies that are answered, whose places get the odd values.
GOOD: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("POST", "/v1/completions"): (
        {"model": "oracle", "prompt": "hello", "max_tokens": 3, "logprobs": 2, "echo": True, **_SHORT, **_OURS},
        {"model": "oracle", "prompt": [[1, 2], [3]], "max_tokens": 3, "n": 2, "stop": ["zz"], "seed": 3,
         "logit_bias": {"97": 1}, "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("POST", "/v1/embeddings"): (
        {"model": "oracle", "input": ["hello", "you"], "encoding_format": "base64", "dimensions": 4, "user": "u",
         "cache_salt": "s", "umbel": {"priority": 1, "timeout": 9.5}},
        {"model": "oracle", "input": [[1, 2], [3]]},
    ),
    ("POST", "/v1/rerank"): (
        {"model": "oracle", "query": "which", "documents": ["a", {"text": "b"}], "template": "{query}{text}",
         "top_n": 1, "return_documents": True},
    ),
    ("POST", "/v1/chat/completions"): (
        {"model": "oracle", "max_tokens": 4, "messages": [
            {"role": "system", "content": "be short", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{\"q\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "none"}],
         "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "none", **_SHORT, **_OURS},
        {"model": "oracle", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "stream": True,
         "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}}}},
    ),
    ("POST", "/v1/responses"): (
        {"model": "oracle", "max_output_tokens": 3, "instructions": "be short", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
         "tools": [{"type": "function", **_TOOL}], "tool_choice": "none", "reasoning": {"effort": None},
         "metadata": {"a": "b"}, "temperature": 0, **_OURS},
        {"model": "oracle", "max_output_tokens": 9, "input": "hello", "stream": True,
         "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}}},
    ),
    ("POST", "/v1/messages"): (
        {"model": "oracle", "max_tokens": 3, "system": [{"type": "text", "text": "be short"}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {"q": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "none"}]}],
         "tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "none"}, "temperature": 0, "stop_sequences": ["zz"],
         "metadata": {"user_id": "u"}, **_OURS},
        {"model": "oracle", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "stream": True},
    ),
    ("POST", "/v1/messages/count_tokens"): (
        {"model": "oracle", "messages": [{"role": "user", "content": "hello"}], "tools": [_ANTHROPIC_TOOL]},
    ),
    ("POST", "/v1/caches"): (
        {"model": "oracle", "messages": [{"role": "system", "content": "be short, be kind"}], "ttl": "60s",
         "tools": [{"type": "function", "function": _TOOL}], "cache_salt": "s"},
    ),
    ("PATCH", "/v1/caches/{name}"): ({"ttl": 60, "umbel": _OURS["umbel"]},),
    ("POST", "/runtime"): ({"message": base64.b64encode(_QUESTION).decode()},),
    ("POST", "/v1/programs/{name}/runs"): (
        {"arguments": {"q": "why"}, "sampling": {"max_tokens": 3, "temperature": 0},
         "budget": {"tokens": 100, "calls": 5, "seconds": 30}, **_OURS},
    ),
    ("POST", "/generate"): (
        {"text": "hello", "sampling_params": _SAMPLING, "return_logprob": True, "logprob_start_len": 1,
         "top_logprobs_num": 2, "rid": "mine", "model": "oracle", **_OURS},
        {"parts": [["t", "a", True], ["g", "", [98]]], "sampling_params": {"max_new_tokens": 2}, "stream": True,
         "constraint": {"kind": "regex", "source": "[a-z]+"}},
        {"input_ids": [[1, 2], [3]], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 1}]},
    ),
    ("POST", "/score"): (
        {"text": "hello", "choices": ["yes", "no"], "unconditional": True, "probability": "exact", **_OURS},
    ),
    ("POST", "/tokenize"): ({"prompt": ["hello", "you"], "add_special_tokens": False, "model": "oracle", **_OURS},),
    ("POST", "/detokenize"): ({"tokens": [[104, 105]], "skip_special_tokens": False, "model": "oracle",
                               "umbel": _OURS["umbel"]},),
    ("POST", "/hints"): ({"text": "hello", "id": "mine", "pin": 1.0, **_OURS},),
    ("POST", "/abort"): ({"rid": "mine", "umbel": _OURS["umbel"]},),
    ("POST", "/abort_request"): ({"rid": "mine"},),
}  # fmt: skip


LIMITS = HttpLimits(cache_minimum=8)


@ul.function
def ask(s: ul.State, q: str = "why") -> None:
    s += q + ul.gen("a", max_tokens=3)


PROGRAM = serialise.encode(ask.trace())


def small() -> LocalBackend:
    """A context of 640 tokens, which holds every good body, ends each text soon."""
    return LocalBackend(context_length=640, pool_tokens=4_096, debug={"check_every_step": False})


async def prepared(client: AsgiClient) -> AsgiClient:
    """Makes the program and the cache that the good bodies name."""
    put = await client.begin("PUT", "/v1/programs/odd", PROGRAM).ended()
    assert put.status in (200, 201), put.content
    await client.begin("DELETE", "/v1/caches/odd").ended()
    (body,) = GOOD["POST", "/v1/caches"]
    made = await client.post("/v1/caches", {**body, "name": "odd", "ttl": 600, "cache_salt": None})
    assert made.status == 201, made.content
    return client


def url(endpoint: Endpoint, name: str = "odd") -> str:
    return endpoint.path.replace("{name}", name)


def places(endpoint: Endpoint) -> list[tuple[dict[str, Any], tuple[str | int, ...]]]:
    """Every place of the good bodies of an endpoint, and every field that they lack: (body, path to the place)."""
    found: list[tuple[dict[str, Any], tuple[str | int, ...]]] = []
    for body in GOOD[endpoint.method, endpoint.path]:
        found += [(body, path) for path in _paths(body)]
    first = GOOD[endpoint.method, endpoint.path][0]
    assert endpoint.body is not None
    names = {field.encode_name for field in msgspec.structs.fields(endpoint.body)}
    return found + [(first, (name,)) for name in sorted(names - first.keys())]


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*path, key))


def with_value(body: Any, path: Sequence[str | int], value: bytes) -> bytes:
    """The JSON of a body with `value`, as it is, at a place."""
    return json.dumps(_marked(body, path)).encode().replace(_MARK, value)


def _marked(body: Any, path: Sequence[str | int]) -> Any:
    if not path:
        return _HERE
    first, rest = path[0], path[1:]
    if isinstance(body, dict):
        return {**body, first: _marked(body.get(first), rest)}
    return [_marked(each, rest) if number == first else each for number, each in enumerate(body)]


def whole_bodies(endpoint: Endpoint) -> Iterator[bytes]:
    """Bodies that are odd as a whole: no JSON, a field twice, an unknown field, a field missing."""
    good = GOOD[endpoint.method, endpoint.path][0]
    data = json.dumps(good).encode()
    yield from (b"", b"\x00", b"\xff\xfe{}", b"\xef\xbb\xbf" + data, data[:-1], data + data, data + b"x", b"a=b&c=d")
    first = next(iter(good))
    yield b"{" + json.dumps(first).encode() + b":[]," + data[1:]
    yield json.dumps({**good, "nonsense": 1}).encode()
    yield json.dumps({**good, "\ud800": 1}).encode()
    for name in good:
        yield json.dumps({key: value for key, value in good.items() if key != name}).encode()


def odd_requests(endpoint: Endpoint, values: Sequence[bytes] = VALUES) -> Iterator[tuple[str, bytes]]:
    """Each value in each place of an endpoint's bodies → (what is odd, the body)."""
    for (body, path), value in itertools.product(places(endpoint), values):
        yield f"{'.'.join(map(str, path))} = {value[:40]!r}", with_value(body, path, value)


def some_requests(endpoint: Endpoint, count: int, start: int = 0) -> Iterator[tuple[str, bytes]]:
    """As `odd_requests`, a few of them: every place in turn, with the next value each time."""
    spots = places(endpoint)
    for number in range(start, start + count):
        body, path = spots[number % len(spots)]
        value = VALUES[number * 7 % len(VALUES)]
        yield f"{'.'.join(map(str, path))} = {value[:40]!r}", with_value(body, path, value)
