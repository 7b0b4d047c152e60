"""Runs the messages of rank 0 on another rank, in their order."""

from collections.abc import Iterable
from typing import assert_never

from ..core.batch import AsyncRunner, Runner
from ..core.messages import EngineForget, EnginePicture
from .messages import Clear, RankStep, ToRank


def follow(runner: Runner, messages: Iterable[ToRank]) -> None:
    """Runs messages until there are no more. This rank's logits are not read, so it never waits for a step."""
    for message in messages:
        match message:
            case RankStep() if isinstance(runner, AsyncRunner):
                runner.launch(message.batch())
            case RankStep():
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
