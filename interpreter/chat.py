"""`umbel chat`: a conversation in the terminal, itself a program of the language."""

import warnings
from collections.abc import Callable, Iterator

from ..lang.chat_template import TemplateWarning
from ..lang.generation import gen
from ..lang.ops import assistant, system, user
from ..lang.state import State
from .arguments import sampling_defaults
from .backends.runtime import Runtime
from .function import function

HELP = "/reset starts anew, /usage counts tokens, /quit or Ctrl-D ends"
# Without a chat template turns are plain lines; a model that goes on would write the other side's too.
PLAIN_STOPS = ("\nUSER:", "\nASSISTANT:", "\nSYSTEM:")


@function
def conversation(
    s: State,
    lines: Iterator[str],
    show: Callable[[str], None],
    opening: str | None,
) -> bool:
    """One conversation until `lines` ends or asks for a new one. Returns whether to begin again."""
    if opening:
        s += system(opening)
    for line in lines:
        match line.strip():
            case "":
                continue
            case "/quit":
                return False
            case "/reset":
                return True
            case "/usage":
                show(f"{s.usage}\n")
            case text:
                s += user(text)
                s += assistant(gen("reply"))
                for piece in s.text_iter("reply"):
                    show(piece)
                show("\n")
    return False


def chat(model: str | None, *, system: str | None, temperature: float, max_tokens: int) -> int:
    """Runs until the user leaves. Returns the exit status."""
    import rich.console

    settings = sampling_defaults({"temperature": temperature, "max_tokens": max_tokens})  # before a model is loaded
    console = rich.console.Console(highlight=False)
    with Runtime(model) as runtime:
        runtime.wait_ready()
        console.print(f"[bold]{runtime.capabilities.name}[/bold]  [dim]{HELP}[/dim]")
        stops = None
        if runtime.chat_template.source is None:
            stops = PLAIN_STOPS
            warnings.simplefilter("ignore", TemplateWarning)  # said here, better
            console.print("[yellow]This model has no chat template: turns are written as plain lines.[/yellow]")

        def lines() -> Iterator[str]:
            while True:
                try:
                    yield console.input("[bold green]>[/bold green] ")
                except EOFError:
                    return

        again = True
        while again:
            state = conversation.run(
                lines(),
                lambda text: console.print(text, end="", markup=False),
                system,
                backend=runtime,
                **settings,
                stop=stops,
                stream=True,  # or the reply could come whole, if it is asked for before somebody reads it
            )
            for _ in state.text_iter():  # ends with the conversation, and raises what went wrong in it
                pass
            again = state.ret_value
    return 0
