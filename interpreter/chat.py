"""`umbel chat`: a conversation in the terminal, itself a program of the language."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence

from ..lang.chat_template import TemplateWarning
from ..lang.errors import CapabilityError, ParameterError, RequestError
from ..lang.generation import gen
from ..lang.ops import Image, assistant, image, system, user
from ..lang.protocol import Capabilities
from ..lang.state import State
from . import media
from .backends.runtime import Runtime
from .body import sampling_defaults
from .program import Program, maker

HELP = "/reset starts anew, /usage counts tokens, /quit or Ctrl-D ends"
HELP_WITH_IMAGES = f"/image PATH puts a picture into your next line, {HELP}"


def picture(path: str) -> Image:
    """Reads a picture by its path, which may be quoted, as terminals write a file dropped on them.

    Raises:
        ParameterError: there is no path, no such file, or it is too large.
    """
    bare = path.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
        bare = bare[1:-1]
    if not bare:
        raise ParameterError("/image needs the path of a picture; write /image photo.png")
    op = image(os.path.expanduser(bare))
    media.check(op)
    return op


def check_sees(capabilities: Capabilities) -> None:
    """Raises CapabilityError when pictures would be refused later, in the middle of a conversation."""
    if not capabilities.images:
        raise CapabilityError(
            f"{capabilities.name} takes no images; start umbel chat with --model and the folder of a vision model"
        )


@maker(Program)
def conversation(
    s: State,
    lines: Iterator[str],
    show: Callable[[str], None],
    opening: str | None,
    attach: Callable[[str], Image] = picture,
    pictures: Sequence[Image] = (),
) -> bool:
    """Runs one conversation until `lines` ends or asks for a new one. Returns whether to begin again.

    Args:
        attach: a path → the picture, or an error that is shown.
        pictures: of the first message.
    """
    if opening:
        s += system(opening)
    waiting = list(pictures)  # for the next message
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
            case command if command.split()[0] == "/image":
                try:
                    waiting.append(attach(command.removeprefix("/image")))
                except (CapabilityError, ParameterError) as error:
                    show(f"{error}\n")
            case text:
                s += user([*waiting, text])
                waiting.clear()
                s += assistant(gen("reply"))
                for piece in s.text_iter("reply"):
                    show(piece)
                show("\n")
    return False


def chat(
    model: str | None, *, system: str | None, temperature: float, max_tokens: int, images: Sequence[str] = ()
) -> int:
    """Runs until the user leaves; `images` are paths of pictures for the first message. Returns the exit status.

    Raises:
        CapabilityError: there are images, and the model takes none.
        ParameterError: an option, or a path that is no file.
    """
    import rich.console

    # Both before a model is loaded.
    settings = sampling_defaults({"temperature": temperature, "max_tokens": max_tokens})
    pictures = [picture(path) for path in images]
    console = rich.console.Console(highlight=False)
    with Runtime(model) as runtime:
        runtime.wait_ready()
        capabilities = runtime.capabilities
        if pictures:
            check_sees(capabilities)

        def attach(path: str) -> Image:
            check_sees(capabilities)
            return picture(path)

        shown = HELP_WITH_IMAGES if capabilities.images else HELP
        console.print(f"[bold]{capabilities.name}[/bold]  [dim]{shown}[/dim]")
        if runtime.chat_template.source is None:
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
                attach,
                pictures,
                backend=runtime,
                **settings,
                stop=runtime.chat_template.turn_stops,
                stream=True,  # or the reply could come whole, if it is asked for before it is read
            )
            pictures = []
            try:
                for _ in state.text_iter():  # ends with the conversation, and raises what went wrong in it
                    pass
                again = state.ret_value
            except (ParameterError, RequestError) as error:  # a broken picture, or no room for more
                console.print(f"{error}\nThe conversation begins anew.", markup=False)
    return 0
