"""Says what the trace of a file leaves out or assumes."""

from collections.abc import Sequence

from ...lang.protocol import Capabilities


def counts_of(models: Sequence[Capabilities]) -> str:
    """Returns the model of a runtime whose tokens a file has; "" where a provider, or several models, have counted."""
    names = {model.name.partition(" ")[2] for model in models if model.token_ids}
    return names.pop() if len(models) == len(names) == 1 else ""


def notes_of(*, constrained: int = 0, searched: int = 0, branches: bool) -> list[str]:
    """Returns the sentences. constrained, searched: such calls. branches: there are some."""
    notes: list[str] = []
    if constrained:
        notes.append(f"{constrained} calls had constraints: their answers are as long, and no token of them is forced")
    if searched:
        notes.append(f"{searched} selects were searched: they are simulated as one sequence for each choice")
    if branches:
        notes.append(
            "a call waits for what the branches of its stream had called before it, and forks announce no prefix"
        )
    return notes
