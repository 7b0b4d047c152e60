"""`sglang.utils`: helpers that programs import."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ...lang.errors import CapabilityError
from .lang.interpreter import ProgramState


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function of SGLang's that only says what to write instead."""

    def refuse(*arguments: object, **keywords: object) -> NoReturn:
        raise CapabilityError(f"{name}() has no counterpart here; {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises CapabilityError: {instead}."
    return refuse


def read_jsonl(filename: str) -> Iterator[Any]:  # Any: JSON
    """The values of a file with one JSON text a line; lines that begin with # and empty ones are passed over."""
    with Path(filename).open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def dump_state_text(filename: str, states: Iterable[ProgramState | str], mode: str = "w") -> None:
    """Writes the texts of states to a file, each under a line with its number."""
    with Path(filename).open(mode, encoding="utf-8") as file:
        for number, state in enumerate(states):
            file.write(f"{'=' * 40} {number} {'=' * 40}\n{state if isinstance(state, str) else state.text()}\n\n")


def print_highlight(html_content: str) -> None:
    """Prints a text of a notebook."""
    print(html_content)


encode_image_base64 = refused("encode_image_base64", "give the path or the bytes to image(...)")
encode_frame = refused("encode_frame", "give the clip to video(path, num_frames)")
encode_video_base64 = refused("encode_video_base64", "give the clip to video(path, num_frames)")
download_and_cache_file = refused("download_and_cache_file", "download the file yourself, and give its path")
launch_server_cmd = refused("launch_server_cmd", "write Runtime(model_path=...), which starts what it needs")
execute_shell_command = refused("execute_shell_command", "write subprocess.Popen(...)")
wait_for_server = refused("wait_for_server", "write runtime.wait_ready(); a RuntimeEndpoint asks at its first use")
terminate_process = refused("terminate_process", "write runtime.shutdown()")
http_request = refused("http_request", "write RuntimeEndpoint(url), or use an HTTP client of your own")
