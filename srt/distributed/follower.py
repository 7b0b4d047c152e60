"""What a rank other than 0 does: what it is told, in that order."""

from collections.abc import Iterable
from typing import assert_never

from ..core.batch import AsyncRunner, Runner
from ..core.messages import EngineForget, EnginePicture
from .messages import Clear, Step, ToRank


def follow(runner: Runner, messages: Iterable[ToRank]) -> None:
    """Until there are no more messages. Nobody reads this rank's answers, so it never waits for one."""
    for message in messages:
        match message:
            case Step() if isinstance(runner, AsyncRunner):
                runner.launch(message.batch())
            case Step():
                runner.forward(message.batch())
            case Clear():
                runner.clear()
            case EnginePicture():
                assert runner.pictures is not None, "rank 0 has the same model"
                runner.pictures.put(message)
            case EngineForget(number=number):
                assert runner.pictures is not None, "rank 0 has the same model"
                runner.pictures.forget(number)
            case _:
                assert_never(message)
