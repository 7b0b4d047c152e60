"""Echo conforms; and the suite notices a backend that does not."""

from collections.abc import AsyncIterator

import msgspec
import pytest
from umbel.interpreter.backends.echo import Echo
from umbel.lang.protocol import Chunk, Final, GenRequest

from .. import conformance


@pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
def test_echo_conforms(case: conformance.Case) -> None:
    conformance.check(case, Echo)


class Stutters(Echo):
    """Sends its first chunk twice."""

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        first = True
        async for event in super().generate(request):
            if first and isinstance(event, Chunk):
                yield event
            first = False
            yield event


class Forgets(Echo):
    """Gives one continuation whatever n is."""

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        async for event in super().generate(request):
            yield (
                msgspec.structs.replace(event, completions=event.completions[:1]) if isinstance(event, Final) else event
            )


@pytest.mark.parametrize(
    ("broken", "case"),
    [(Stutters, conformance.chunks_add_up_to_the_text), (Forgets, conformance.n_gives_so_many_continuations)],
)
def test_the_suite_notices_a_broken_backend(broken: type[Echo], case: conformance.Case) -> None:
    with pytest.raises(AssertionError):
        conformance.check(case, broken)
