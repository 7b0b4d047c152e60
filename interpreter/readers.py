"""Readers of pieces. Each has its own place in a feed and its own wake-up, so none takes anything from another."""

from collections.abc import Callable, Iterator

from .variables import Feed, Piece
from .waiting import Signal


class PieceReader:
    """One reader's walk along a feed.

    Args:
        feed: the pieces.
        complete: whether no more will come.
        signals: fired after `feed` has grown or `complete` has changed.
        result: raises the error with which the feed ended, if it did.
    """

    def __init__(
        self, feed: Feed, complete: Callable[[], bool], signals: tuple[Signal, ...], result: Callable[[], object]
    ) -> None:
        self._feed = feed
        self._complete = complete
        self._result = result
        self._place = 0
        self.signals = signals

    def new_pieces(self) -> Iterator[Piece]:
        while self._place < len(self._feed.pieces):
            self._place += 1
            yield self._feed.pieces[self._place - 1]

    def has_news(self) -> bool:
        return self._place < len(self._feed.pieces) or self._complete()

    def at_end(self) -> bool:
        """No more will come, and all that came was given out: looked at in this order."""
        return self._complete() and self._place == len(self._feed.pieces)

    def raise_error(self) -> None:
        self._result()
