"""A graph that is not whole is refused, whatever is wrong with it, with its node and line."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from umbel.compiler.checks.verify import verify
from umbel.compiler.graph import Builder
from umbel.compiler.operations import (
    Append,
    Begin,
    Concat,
    Constant,
    Fork,
    GetForkItem,
    Join,
)
from umbel.lang import ops
from umbel.lang.errors import GraphError

from ..broken_graphs import BROKEN, Parts, ending, generating
from ..random_graphs import graphs


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_what_can_be_said_is_whole(graph):
    verify(graph)


def test_the_parts_are_good():
    verify(Parts().graph())


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_what_is_broken_is_refused(broken):
    graph = broken.change(Parts())
    with pytest.raises(GraphError, match=broken.says):
        verify(graph)


def test_a_refusal_has_the_line_of_the_program():
    graph = ending(Fork(0))(Parts())
    with pytest.raises(GraphError) as refusal:
        verify(graph)
    assert re.match(r"node \d+ \(Fork\) at tips.py:16: ", str(refusal.value))


def test_a_run_may_raise_max_tokens_above_the_programs_min_tokens():
    verify(generating(options={"min_tokens": 300})(Parts()))


def test_a_branch_that_says_more_after_its_join_is_whole():
    parts = Parts()
    more = parts.node(Append(), parts.gens[0], parts.text)
    graph = parts.graph()
    graph = parts.builder.graph(
        "tips", parts.parameters, (parts.join, more, parts.gens[1]), graph.variables, parts.nothing
    )
    verify(graph)


def test_what_a_branch_forked_off_may_come_back_further_up():
    parts = Parts()
    fork = parts.node(Fork(1), parts.gens[0])
    inner = parts.node(Append(), parts.node(GetForkItem(0), fork), parts.text)
    end = parts.node(Join("gather_variable"), parts.join, inner)
    verify(replace(parts.graph(end, fork, inner), ends=(end, fork, parts.gens[1], inner)))


def test_a_turn_goes_on_into_a_branch():
    parts = Parts()
    fork = parts.node(Fork(1), parts.node(ops.RoleBegin("user"), parts.join))
    closed = parts.node(ops.RoleEnd("user"), parts.node(GetForkItem(0), fork))
    verify(parts.graph(fork, closed))


def test_a_long_chain_takes_no_recursion():
    builder = Builder()
    end = builder.node(Begin("long"))
    value = builder.node(Constant("a"))
    for number in range(3000):
        value = builder.node(Concat(), (value, builder.node(Constant(str(number)))))
        end = builder.node(Append(), (end, value))
    verify(builder.graph("long", (), [end], [], value))
