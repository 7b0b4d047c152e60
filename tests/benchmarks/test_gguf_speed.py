"""The table of GGUF files beside llama.cpp."""

from benchmarks.gguf_speed import Row


def test_a_ratio_is_taken_within_its_turn() -> None:
    row = Row("decode 1", "tokens/s", ours=(30.0, 20.0, 40.0), theirs=(10.0, 20.0, 20.0))
    assert str(row) == "| decode 1 | 30 tokens/s | 20 | 2.00 (1.00-3.00) |"


def test_a_figure_without_a_peer_has_no_ratio() -> None:
    assert str(Row("start to first token", "s", ours=(2.0, 1.0, 3.0))) == "| start to first token | 2 s | | |"
