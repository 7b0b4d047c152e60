"""Work that is counted, so that what would take too long ends at the same place on every machine."""

from ..errors import LimitExceeded


class Fuel:
    """`spend` raises LimitExceeded when more was spent than there was; `why` is its text, `keyword` what it names."""

    def __init__(self, steps: int, why: str, keyword: str) -> None:
        self.left = steps
        self.why = why
        self.keyword = keyword

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise LimitExceeded(self.why, keyword=self.keyword)
