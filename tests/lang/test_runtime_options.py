"""Options of a runtime: declared once, taken one by one or in groups."""

import re
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import (
    GONE,
    OPTION_NAMES,
    DebugOptions,
    KeywordOptions,
    RuntimeOptions,
    facts_of,
    options_of,
)


def made(**given: Any) -> RuntimeOptions:
    return options_of("Runtime()", "oracle", given, ("progress",))


def test_type_checkers_see_every_option_with_its_type() -> None:
    declared, written = get_type_hints(RuntimeOptions), get_type_hints(KeywordOptions)
    assert declared.keys() - {"model"} == written.keys() - {"cache", "scheduling"}
    assert {name: kind for name, kind in declared.items() if name not in ("model", "debug", "adapters")} == {
        name: kind for name, kind in written.items() if name not in ("cache", "scheduling", "debug", "adapters")
    }


def test_every_number_has_a_range() -> None:
    for struct in (RuntimeOptions, DebugOptions):
        for name, kind in get_type_hints(struct, include_extras=True).items():
            if get_origin(kind) is not Annotated:
                assert not {int, float} & {kind, *get_args(kind)}, name


def test_groups_are_another_way_to_write_options() -> None:
    flat = made(pool_tokens=512, policy="fcfs", max_running=3, debug=DebugOptions(step_delay=0.5))
    grouped = made(
        cache={"pool_tokens": 512}, scheduling={"policy": "fcfs", "max_running": 3}, debug={"step_delay": 0.5}
    )
    assert flat == grouped
    assert made() == RuntimeOptions(model="oracle")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"polcy": "fcfs"}, "Runtime() has no option 'polcy'; did you mean 'policy'?"),
        ({"progres": True}, "did you mean 'progress'?"),
        ({"check_every_step": True}, "write debug={'check_every_step': True}"),
        ({"fairness": False}, "Runtime() has no option 'fairness' any more"),
        ({"cache": {"pool_token": 3}}, "cache= has no option 'pool_token'; did you mean 'pool_tokens'?"),
        ({"cache": {"policy": "fcfs"}}, "cache= has no option 'policy'; write it as a parameter of its own"),
        ({"scheduling": {"foresight": True}}, "scheduling= has no option 'foresight' any more"),
        ({"debug": {"step_dely": 1.0}}, "debug= has no option 'step_dely'; did you mean 'step_delay'?"),
        ({"debug": {"step_delay": 61.0}}, "step_delay=61.0 is out of range; write 0.0 to 60.0 seconds"),
        ({"cache": {"pool_tokens": 5}, "pool_tokens": 6}, "is given pool_tokens twice"),
        ({"cache": 3}, "cache must be a dict of options, got int 3"),
        ({"debug": True}, "debug must be a dict of options"),
        ({"debug": {"step_delay": 0.1}, "overlap": True}, "leave overlap=True out"),
        ({"draft_model": "small"}, "the oracle has no tokenizer in common with a model"),
        ({"draft_model": ""}, "a name or a path, or leave it out"),
    ],
)
def test_what_is_written_wrong_is_refused_with_what_to_write(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        made(**given)
    assert says in str(caught.value)


def test_an_option_that_is_gone_is_no_option() -> None:
    assert not GONE.keys() & OPTION_NAMES


def test_options_cross_a_process_and_are_told_as_facts() -> None:
    options = made(debug={"check_every_step": True}, seed=4)
    assert msgspec.json.decode(msgspec.json.encode(options), type=RuntimeOptions) == options
    facts = facts_of(options)
    assert (facts["check_every_step"], facts["step_delay"], facts["seed"]) == (True, 0.0, 4)
    assert "debug" not in facts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"token_guesses": False}, "draft_model='small' guesses, and token_guesses=False; leave one of them out"),
        ({"overlap": True}, "draft_model='small' guesses what follows a finished step; leave overlap=True out"),
        ({"tensor_parallel": 2}, "tensor_parallel=2: a draft is not cut into ranks; leave draft_model out"),
    ],
)
def test_a_draft_guesses_with_few_other_options(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(says)):
        RuntimeOptions(model="large", draft_model="small", **given)
    assert RuntimeOptions(model="large", draft_model="small").draft_model == "small"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_running": 0}, 'max_running=0 is out of range; write 1 to 16384, or "auto"'),
        ({"max_running": None}, 'max_running=None is not an integer; write 1 to 16384, or "auto"'),
        ({"chunk_size": "whole"}, "chunk_size='whole' is not an integer; write 1 to 1048576, or \"auto\""),
        ({"max_queue": "auto"}, "max_queue='auto' is not an integer; write 1 to 1048576"),
    ],
)
def test_sizes_of_steps_may_be_left_to_the_device(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        made(**given)
    assert str(caught.value) == says
    options = made(max_running="auto", chunk_size=None)
    assert msgspec.json.decode(msgspec.json.encode(options), type=RuntimeOptions) == options
    assert (options.max_running, options.chunk_size, made().chunk_size) == ("auto", None, "auto")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"memory_share": 0}, "memory_share=0 is out of range; write a part of the GPU's memory, 0.001 to 1"),
        ({"memory_share": 1.5}, "memory_share=1.5 is out of range; write a part of the GPU's memory, 0.001 to 1"),
        ({"memory_share": "half"}, "memory_share='half' is not a number; write a part of the GPU's memory, 0.001 to 1"),
        ({"model": "oracle"}, "memory_share=0.4: the oracle has no weights; leave it out"),
        (
            {"pool_tokens": 9},
            "memory_share=0.4 gives the KV pool what weights and steps leave, and pool_tokens says its size; give one "
            "of them",
        ),
        (
            {"pool_memory": 9},
            "memory_share=0.4 gives the KV pool what weights and steps leave, and pool_memory says its size; give one "
            "of them",
        ),
        (
            {"draft_model": "small"},
            "memory_share=0.4 counts no draft; write pool_tokens or pool_memory in its place",
        ),
        (
            {"device": "cpu"},
            "memory_share=0.4 is a part of a GPU's memory, and the CPU computes; write pool_memory",
        ),
    ],
)
def test_a_share_of_a_gpu_is_of_all_that_a_runtime_takes_there(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        RuntimeOptions(**{"memory_share": 0.4, **given})
    assert str(caught.value) == says
    assert RuntimeOptions(memory_share=0.4, device="cuda:1").memory_share == 0.4
