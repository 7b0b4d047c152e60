"""Files of graphs that come from anywhere: what is wrong is said with its place, and nothing else happens."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.compiler.files import serialise
from umbel.lang.errors import GraphError
from umbel.lang.generation import gen

from ..broken_graphs import Parts
from ..kept_graphs import Named, alike, constant_graph, copied, gen_graph
from ..random_graphs import graphs

WHOLE: dict[str, Any] = json.loads(serialise.encode(Parts().graph()))
TYPED: dict[str, Any] = json.loads(serialise.encode(gen_graph(gen("x", dtype=Named, logit_bias={1: 2}), default=(1,))))


def edited(whole: dict[str, Any], change: str) -> bytes:
    """The file after `change`, a statement about `f`."""
    copy = json.loads(json.dumps(whole))
    exec(change, {"f": copy, "n": copy["nodes"]})
    return json.dumps(copy).encode()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("f['umbel'] = 'grammar'", 'it is no file of a graph, which begins with {"umbel": "graph"'),
        ("f['version'] = 4", "written by a newer umbel: version 4, this one reads 3"),
        ("f['version'] = 0", "version 0 has never been"),
        ("f['version'] = '1'", "version: expected an integer, found '1'"),
        ("f['more'] = 1", "the file: unknown field 'more'; known are umbel"),
        ("del f['ends']", "the file: 'ends' is missing"),
        ("f['name'] = None", "the file.name: expected a string, found None"),
        ("f['parameters'][0]['kind'] = 1", r"parameters\[0\]: unknown field 'kind'"),
        ("f['parameters'][1]['default'] = {'object': 1}", r"parameters\[1\].default: unknown type 'object' of a value"),
        ("n[0] = []", r"nodes\[0\]: expected an object, found \[\]"),
        ("n[0]['op'] = 'Exec'", r"nodes\[0\].op: unknown operation 'Exec'; known are Begin"),
        ("n[0]['op'] = ['Begin']", r"nodes\[0\].op: unknown operation \['Begin'\]"),
        ("del n[0]['program']", r"nodes\[0\]: 'program' is missing"),
        ("n[0]['code'] = 'print()'", r"nodes\[0\]: unknown field 'code'; known are program, number"),
        ("n[0]['program'] = {}", r"nodes\[0\].program: expected text, a number"),
        ("n[3]['inputs'] = [0, 9]", r"nodes\[3\].inputs: there is no node 9 before this place"),
        ("n[3]['inputs'] = [3, 2]", r"nodes\[3\].inputs: there is no node 3 before this place"),
        ("n[3]['inputs'] = [-1, 2]", r"nodes\[3\].inputs: there is no node -1"),
        ("n[3]['inputs'] = [True, 2]", r"nodes\[3\].inputs: expected an integer, found True"),
        ("n[3]['inputs'] = 0", r"nodes\[3\].inputs: expected a list, found 0"),
        ("n[3]['line'] = [1, 1, 'f']", r"nodes\[3\].line: there is no file 1"),
        ("n[3]['line'] = [0, 1]", r"nodes\[3\].line: expected a file's place, a number and a function"),
        ("f['files'] = [1]", r"files\[0\]: expected a string"),
        ("f['fixed'] = [1]", r"fixed\[0\]: expected a string"),
        ("f['ends'] = [99]", r"ends\[0\]: there is no node 99"),
        ("f['ends'] = []", "is needed by nothing; leave it out"),
        ("f['variables'] = [['tip']]", r"variables\[0\]: expected a name and a node"),
        ("f['result'] = 0", "the graph's result is a Begin"),
        ("n[2]['value'] = {'bytes': 'é'}", r"nodes\[2\].value.bytes: no base64"),
        ("n[2]['value'] = {'tuple': 1}", r"nodes\[2\].value.tuple: expected a list"),
        ("n[2]['value'] = {'dict': [[1, 2], [1, 3]]}", r"value.dict\[1\]: the key 1 stands there twice"),
        ("n[2]['value'] = {'dict': [[[1], 2]]}", "value.dict.*unhashable"),
        ("n[2]['value'] = {'set': [[1]]}", "value.set: unhashable"),
        ("n[2]['value'] = {'set': [1, 1]}", "value.set: a member stands in it twice"),
        ("n[2]['value'] = {'float': '1'}", "value.float: expected one of nan, inf, -inf"),
        ("n[2]['value'] = {'a': 1, 'b': 2}", "value: expected an object with one key"),
        ("n[5]['size'] = 0", r"node 5 \(Fork\) at tips.py:6: size=0; write an integer"),
        ("n[5]['size'] = '2'", r"node 5 \(Fork\) at tips.py:6: size='2'"),
        ("n[7] = dict(n[6])", "is in the graph twice, first as node 6"),
        ("n[8]['gen']['tools'] = []", r"nodes\[8\].gen: unknown field 'tools'"),
        ("n[8]['gen']['options'] = {'stop': 'a'}", "gen.options.stop: expected a list"),
        ("n[8]['gen']['options'] = {'heat': 1}", "options has no sampling parameter 'heat'"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(change, says):
    with pytest.raises(GraphError, match=f"^here.umbel.json: .*{says}"):
        serialise.decode(edited(WHOLE, change), source="here.umbel.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("g['constraint']['kind'] = 'c++'", r"nodes\[1\].gen.constraint: .*c\+\+"),
        ("g['constraint']['code'] = ''", "gen.constraint: .*unknown field"),
        ("g['options']['logit_bias'] = [[1, 2]]", "options.logit_bias: expected an object"),
        ("g['options']['logit_bias'] = {'a': 2}", "options.logit_bias: expected ids of tokens as keys"),
        ("g['result'] = 'eval'", "gen.result: expected an object"),
        ("g['result']['reader'] = 'eval'", "result.reader: unknown reader 'eval'; known are text, json, int, float"),
        ("r['typed'] = 'os'", "reader.typed: unknown form 'os'; known are any, int"),
        ("r['typed'] = {}", "reader.typed: unknown form; known are enum"),
        ("r['typed'] = {'reference': 'X'}", "typed.reference: there is no definition 'X'"),
        ("d['Named'] = {'reference': 'Named'}", "definitions.Named: a definition is no reference"),
        ("d['Named']['object'][0] = ['name']", r"object\[0\]: expected a name, a form and whether"),
        ("d['Named']['object'] *= 2", r"object\[2\]: the field 'name' stands there twice"),
        ("d['Named']['object'][1][1]['as'] = 'bytes'", "as: unknown kind 'bytes'; known are list"),
        ("r['typed'] = {'enum': [[1]]}", "no scalar of JSON"),
        ("r['typed'] = {'dictionary': ['str']}", "the form of keys and that of values, found 1"),
    ],
)
def test_what_is_wrong_with_a_result_is_said_with_its_place(change, says):
    names = "g = n[1]['gen']; r = g['result']['reader']; d = r['definitions']; "
    with pytest.raises(GraphError, match=says):
        serialise.decode(edited(TYPED, names + change), source="x")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is no JSON: line 1, column 1"),
        (b"\xff", "it is no UTF-8: byte 0 is 0xff"),
        (b'{"umbel": "graph"', "it is no JSON: line 1"),
        (b"[]", "the file: expected an object"),
        (b'{"umbel": "graph", "umbel": "graph"}', "the key 'umbel' stands twice in one object"),
        (b"[NaN]", "NaN is no number of JSON"),
        (b"[1e999]", "the number 1e999 is too large"),
        (b"[" + b"9" * 5000 + b"]", "it is no JSON: "),
        (b"[" * 200 + b"]" * 200, "it is nested deeper than 128"),
        (b"[" * 10**6, "it is nested deeper than 128"),
        (b'{"a":' * 10**5, "it is nested deeper than 128"),
        (b'["' + rb"\"" * 10**6, "it is no JSON: line 1, column 2: Unterminated string"),
        (rb'["\ud800"]', "has half of a surrogate pair"),
        (rb'["\u0000ffff"]', "is followed by 'ffff'; write 0000, or d800 to dfff"),
        (rb'["\u0000"]', "is followed by ''"),
    ],
    ids=lambda part: str(part)[:20],
)
def test_what_is_no_json_is_said_with_its_place(data, says):
    with pytest.raises(GraphError, match=f"^x: .*{says}"):
        serialise.decode(data, source="x")


def test_brackets_inside_of_texts_are_no_nesting():
    graph = constant_graph('"[' * 500 + "\\{" * 500)
    assert alike(copied(graph), graph)


def test_a_file_that_is_too_large_is_not_read(monkeypatch):
    monkeypatch.setattr("umbel.compiler.files.values.MAX_BYTES", 100)
    with pytest.raises(GraphError, match=r"it has .* bytes; at most 100 are read"):
        serialise.decode(b" " * 101, source="x")


def test_too_many_nodes_are_not_read(monkeypatch):
    monkeypatch.setattr(serialise, "MAX_NODES", 3)
    with pytest.raises(GraphError, match="it has 15 nodes; at most 3 are read"):
        serialise.decode(json.dumps(WHOLE).encode(), source="x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.floats() | st.sampled_from(["", "op", "Begin", "int", "leaf"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["op", "inputs", "set"]), inner),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.data())
def test_files_that_were_tampered_with_are_refused_or_whole(graph, data):
    whole = json.loads(serialise.encode(graph))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(whole)))
        match data.draw(st.sampled_from(["replace", "delete", "copy"])):
            case "replace":
                container[key] = data.draw(JSON)
            case "delete":
                del container[key]
            case "copy" if isinstance(container, list):
                container.insert(data.draw(st.integers(0, len(container))), container[key])
    try:
        found = serialise.decode(json.dumps(whole).encode(), source="x")
    except GraphError:
        return
    assert alike(copied(found), found)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bytes_that_were_tampered_with_are_refused_or_whole(data):
    bytes_ = bytearray(serialise.encode(Parts().graph()))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(bytes_) - 1))
        bytes_[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        serialise.decode(bytes(bytes_), source="x")
    except GraphError:
        return
