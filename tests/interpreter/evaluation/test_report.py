"""Reports: what they say, at any width, saved and loaded; comparisons and calibration."""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import umbel as ul

CHOICES = [" A", " B", " C", " D"]


@ul.function
def first(s, question: str):
    if question == "broken":
        raise ValueError("no such question")
    s += f"Question: {question}\nAnswer:" + ul.select("answer", choices=CHOICES)


@ul.function
def second(s, question: str):
    s += f"Think. Question: {question}\nAnswer:" + ul.select("answer", choices=CHOICES)


MATCH = ul.exact_match("answer", "label")


def data(count: int = 40) -> list[dict[str, str]]:
    draw = random.Random(1)
    return [{"question": f"q{number}", "label": draw.choice("ABCD")} for number in range(count)]


@pytest.fixture(scope="module")
def reports() -> tuple[ul.EvaluationReport, ul.EvaluationReport]:
    rows = [*data(), {"question": "broken", "label": "A"}]
    return ul.evaluate(first, rows, MATCH, backend=ul.Echo()), ul.evaluate(second, rows, MATCH, backend=ul.Echo())


Reports = tuple[ul.EvaluationReport, ul.EvaluationReport]


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_no_line_is_wider_than_asked(reports: Reports, width: int) -> None:
    one, other = reports
    texts = [one.text(width), one.compare(other).text(width)]
    if width >= 40:
        texts.append(one.calibration("answer", "label").text(width))
    for text in texts:
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text


def test_printing_takes_the_width_of_the_terminal(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert str(reports[0]) == reports[0].text(40)


def test_a_report_that_was_loaded_is_the_one_that_was_saved(reports: Reports, tmp_path: Path) -> None:
    report = reports[0]
    loaded = ul.EvaluationReport.load(report.save(tmp_path / "report.json"))
    assert loaded == report
    assert str(loaded) == str(report)
    assert str(loaded.calibration("answer", "label")) == str(report.calibration("answer", "label"))
    assert loaded.to_dict() == report.to_dict()


def test_a_report_with_values_that_json_lacks_is_saved(tmp_path: Path) -> None:
    rows = [
        {"question": "\ud800", "label": 2**80},
        {"question": "x", "label": math.nan},
        {"question": "y", "label": b"z"},
    ]
    report = ul.evaluate(second, rows, lambda state, row: True, backend=ul.Echo())
    loaded = ul.EvaluationReport.load(report.save(tmp_path / "report.json"))
    assert loaded == report
    assert loaded.results[0].inputs == {"question": "\ud800", "label": 2**80}
    assert str(loaded)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no JSON", "is no report"),
        ("[]", "is no report"),
        ('{"results": [], "format": 99}', "a report of format 99"),
        ('{"results": [], "format": 1}', "is no whole report"),
        ('{"results": [{"row": "x"}], "format": 1}', "is no whole report"),
    ],
)
def test_a_file_that_is_no_report_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ul.ParameterError, match=words):
        ul.EvaluationReport.load(path)
    with pytest.raises(ul.ParameterError, match="cannot be read"):
        ul.EvaluationReport.load(tmp_path / "missing.json")


def test_a_report_becomes_a_frame_and_html(reports: Reports) -> None:
    pytest.importorskip("pandas")
    frame = reports[0].to_pandas()
    assert len(frame) == 41
    assert {"row", "question", "label", "answer", "exact_match", "error", "seconds", "prompt_tokens"} <= {
        *frame.columns
    }
    assert frame["error"].notna().sum() == 1
    html = reports[0]._repr_html_()
    ElementTree.fromstring(html.replace("<details open>", "<details>"))
    assert "exact_match" in html


def test_html_of_foreign_texts_is_escaped() -> None:
    rows = [{"question": "<script>alert(1)</script>", "label": "<b>"}]
    report = ul.evaluate(second, rows, MATCH, backend=ul.Echo())
    both = report._repr_html_() + report.compare(report)._repr_html_()
    assert "<script>" not in both
    assert "&lt;script&gt;" in both


# -------------------------------------------------------------------------------- comparison


def test_a_comparison_finds_the_rows_that_changed_in_both_directions(reports: Reports) -> None:
    one, other = reports
    comparison = ul.compare(one, other)
    main = comparison.main
    before, after = one.values("exact_match"), other.values("exact_match")
    assert set(main.better) == {row for row in before if after[row] > before[row]}
    assert set(main.worse) == {row for row in before if after[row] < before[row]}
    assert main.better
    assert main.worse
    assert main.difference == pytest.approx((len(main.better) - len(main.worse)) / 41)
    assert main.test == "exact McNemar test"
    assert main.low < main.difference < main.high
    assert [pair[0].row for pair in comparison.worse] == list(main.worse)
    told = str(comparison)
    assert f"worse        {len(main.worse)} rows" in told
    json.dumps(comparison.to_dict())


def test_numbers_are_compared_by_a_permutation_test() -> None:
    def metric(state: ul.State, row: dict[str, Any]) -> float:
        return float(state.get_meta_info("answer")["probabilities"][f" {row['label']}"])

    one = ul.evaluate(first, data(), metric, backend=ul.Echo())
    other = ul.evaluate(second, data(), metric, backend=ul.Echo())
    difference = one.compare(other).main
    assert difference.test.startswith("permutation test")
    assert difference.method.startswith("bootstrap")
    assert 0 < difference.p_value <= 1
    assert one.compare(one).main.p_value == 1.0


def test_numbers_that_change_by_one_or_not_at_all_are_no_shares() -> None:
    def rated(rating: float) -> ul.EvaluationReport:
        return ul.evaluate(second, data(4), lambda state, row: rating, backend=ul.Echo())

    difference = ul.compare(rated(3), rated(4)).main
    assert (difference.low, difference.high, difference.is_share) == (1.0, 1.0, False)
    assert difference.test == "exact permutation test"
    same = ul.compare(rated(0.019), rated(0.019)).main
    assert (same.method.split(",")[0], same.test, same.p_value) == ("bootstrap", "permutation test", 1.0)


def test_an_improvement_of_many_rows_is_significant_and_one_of_few_is_not() -> None:
    def of(right: int) -> ul.EvaluationReport:
        return ul.evaluate(second, data(), lambda state, row: int(row["question"][1:]) < right, backend=ul.Echo())

    assert of(10).compare(of(30)).main.p_value < 0.001
    assert of(10).compare(of(12)).main.p_value > 0.05


def test_reports_of_other_data_are_not_compared(reports: Reports) -> None:
    whole = ul.evaluate(second, data(), MATCH, backend=ul.Echo())
    changed = [{**row, "label": "A" if number == 7 else row["label"]} for number, row in enumerate(data())]
    changed[7]["label"] = "other"
    cases: list[tuple[Any, str]] = [
        (data(30), "the first has 40 rows, the second 30; only one has row 30, 31"),
        (changed, "row 7 has label='.' in the first, and 'other' in the second"),
        ([{**row, "id": 1} for row in data()], "the columns 'question', 'label', and the second the columns"),
    ]
    for rows, words in cases:
        with pytest.raises(ul.ParameterError, match=words):
            whole.compare(ul.evaluate(second, rows, MATCH, backend=ul.Echo()))
    with pytest.raises(ul.ParameterError, match="compare\\(second=3\\)"):
        whole.compare(3)  # type: ignore[arg-type]
    with pytest.raises(ul.ParameterError, match="figures 'exact_match', and the second the figures 'other'"):
        whole.compare(ul.evaluate(second, data(), lambda state, row: {"other": 1}, backend=ul.Echo()))


def test_reports_of_other_right_answers_are_not_compared() -> None:
    rows = [{**row, "other": "A"} for row in data(4)]

    def report(program: Any, variable: str, label: str, **options: Any) -> ul.EvaluationReport:
        return ul.evaluate(program, rows, ul.exact_match(variable, label, **options), backend=ul.Echo())

    one = report(second, "answer", "label")
    with pytest.raises(ul.ParameterError, match="the first has label='label', and the second 'other'; evaluate both"):
        ul.compare(one, report(second, "answer", "other"))
    with pytest.raises(ul.ParameterError, match="the first has ignore_case=False, and the second True"):
        ul.compare(one, report(second, "answer", "label", ignore_case=True))
    assert ul.compare(one, report(first, "answer", "label")).main.count == 4


def test_programs_of_two_names_may_name_their_variables_otherwise() -> None:
    @ul.function
    def both(s, question):
        s += question + ul.select("draft", choices=CHOICES) + ul.select("final", choices=CHOICES)

    draft, final = (
        ul.evaluate(both, data(4), ul.exact_match(name, "label"), backend=ul.Echo()) for name in ("draft", "final")
    )
    with pytest.raises(ul.ParameterError, match="the first has variable='draft', and the second 'final'"):
        ul.compare(draft, final)
    assert ul.compare(ul.evaluate(second, data(4), MATCH, backend=ul.Echo()), final).main.count == 4


def test_a_report_of_an_earlier_version_is_read_and_compared(reports: Reports, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    told = reports[0].to_dict()
    for name in ("variable", "label", "ignore_case"):
        del told[name]
    path.write_text(json.dumps(told))
    loaded = ul.EvaluationReport.load(path)
    assert (loaded.variable, loaded.label, loaded.ignore_case) == ("", "", None)
    assert str(loaded.calibration("answer", "label")) == str(reports[0].calibration())
    assert ul.compare(loaded, reports[1]).main == ul.compare(*reports).main


# -------------------------------------------------------------------------------- failures alone


def test_programs_that_all_fail_have_the_error_score_for_their_mean() -> None:
    rows = [{"question": "broken", "label": "A"}] * 3
    figures = lambda state, row: {"right": True, "length": 2.5}  # noqa: E731
    report = ul.evaluate(first, rows, figures, backend=ul.Echo(), error_score=-1)
    assert (report.mean, report.figure.count, report.figure.is_share) == (-1.0, 3, False)
    assert ul.evaluate(first, rows, MATCH, backend=ul.Echo(), error_score=-1).accuracy == 0.0
    with pytest.raises(ul.ParameterError, match="gives numbers, and no share"):
        _ = report.accuracy


def test_programs_that_all_fail_are_compared_where_the_figure_is_known() -> None:
    rows = [{"question": "broken", "label": "A"}] * 3
    failed, well = (ul.evaluate(program, rows, MATCH, backend=ul.Echo()) for program in (first, second))
    assert (ul.compare(failed, well).main.first, ul.compare(failed, well).main.is_share) == (0.0, True)
    figures = lambda state, row: {"right": True, "length": 2.5}  # noqa: E731
    failed, well = (ul.evaluate(program, rows, figures, backend=ul.Echo()) for program in (first, second))
    with pytest.raises(ul.ParameterError, match=r"the first report has no row with figures.* see its errors") as raised:
        ul.compare(failed, well)
    assert "same metric" not in str(raised.value)
    with pytest.raises(ul.ParameterError, match="the second report has no row with figures"):
        ul.compare(well, failed)


def test_rows_that_one_metric_could_not_measure_are_left_out_of_the_comparison() -> None:
    def metric(state: ul.State, row: dict[str, Any]) -> bool:
        if row["question"] == "q3" and "Think" in state.text():
            raise RuntimeError("no judge")
        return True

    one = ul.evaluate(first, data(), metric, backend=ul.Echo())
    other = ul.evaluate(second, data(), metric, backend=ul.Echo())
    assert one.compare(other).main.count == 39


# -------------------------------------------------------------------------------- calibration


def scored(share: float, right: int, count: int) -> list[dict[str, str]]:
    return [{"question": f"{share} {number}", "label": "A" if number < right else "B"} for number in range(count)]


def certain(prompt: str, choice: str) -> float:
    share = float(prompt.split("Question: ")[1].split()[0])
    return math.log(share if choice == " A" else (1 - share) / 3)


@pytest.fixture(scope="module")
def calibrated() -> ul.EvaluationReport:
    class Scored(ul.Echo):
        async def score(self, request: Any) -> Any:
            self._scores = {choice: certain(str(request.prompt), choice) for choice in CHOICES}
            return await super().score(request)

    rows = [*scored(0.9, 9, 10), *scored(0.6, 2, 10)]
    return ul.evaluate(second, rows, MATCH, backend=Scored(), num_threads=1)


def test_bins_have_the_accuracy_and_the_confidence_of_their_rows(calibrated: ul.EvaluationReport) -> None:
    found = calibrated.calibration("answer", "label", bins=5)
    low, high = found.bins
    assert (low.count, low.accuracy, round(low.confidence, 6)) == (10, 0.2, 0.6)
    assert (high.count, high.accuracy, round(high.confidence, 6)) == (10, 0.9, 0.9)
    assert found.ece == pytest.approx(0.5 * 0.4 + 0.5 * 0.0)
    assert found.brier == pytest.approx((9 * 0.01 + 0.81 + 2 * 0.16 + 8 * 0.36) / 20)
    assert [(kept.count, kept.accuracy) for kept in found.kept] == [(5, 1.0), (10, 0.9), (15, 11 / 15), (20, 0.55)]
    assert "0.200, 5 bins of equal width, 2 with rows" in str(found)


def test_the_metric_names_variable_and_label_of_the_calibration(calibrated: ul.EvaluationReport) -> None:
    assert calibrated.calibration() == calibrated.calibration("answer", "label")
    other = ul.evaluate(second, data(2), lambda state, row: True, backend=ul.Echo())
    with pytest.raises(ul.ParameterError, match=r'write a name: calibration\("answer", "label"\)'):
        other.calibration("answer")


def test_the_right_value_is_shown_where_its_column_is_called_as_the_variable() -> None:
    rows = [{"question": "x", "answer": "Z"}]
    report = ul.evaluate(second, rows, ul.exact_match("answer", "answer"), backend=ul.Echo())
    assert "right is 'Z', question='x'" in report.text(100)
    assert next(report.rows())["answer_out"] in CHOICES


def test_bins_of_equal_counts_have_as_many_rows_each(calibrated: ul.EvaluationReport) -> None:
    found = calibrated.calibration("answer", "label", bins=4, equal_counts=True)
    assert [bin.count for bin in found.bins] == [5, 5, 5, 5]
    assert "4 bins of as many rows each" in found.binning


def test_rows_without_probabilities_are_left_out_and_told(reports: Reports) -> None:
    found = reports[0].calibration("answer", "label")
    assert (len(found.rows), found.left_out) == (40, 1)
    assert found.accuracy == pytest.approx(reports[0].mean * 41 / 40)
    assert sum(bin.count for bin in found.bins) == 40
    json.dumps(found.to_dict())


def test_labels_that_are_no_choices_are_told(reports: Reports) -> None:
    rows = [*data(9), {"question": "x", "label": "E"}]
    found = ul.evaluate(second, rows, MATCH, backend=ul.Echo()).calibration("answer", "label")
    assert found.unknown_labels == 1
    with pytest.raises(ul.ParameterError, match="no label is one of the choices: row 0 has question='q0'"):
        reports[0].calibration("answer", "question")
    with pytest.raises(ul.ParameterError, match="no such column; it has the columns 'question', 'label'"):
        reports[0].calibration("answer", "lable")
    with pytest.raises(ul.ParameterError, match="write one of the selects 'answer'"):
        reports[0].calibration("anser", "label")


@pytest.mark.parametrize("label", ["a", ["A", "x"], ["b", "a"]])
def test_calibration_compares_labels_as_the_metric_did(label: object) -> None:
    rows = [{"question": f"q{number}", "label": label} for number in range(4)]
    scores = {" A": -0.1, " B": -3.0, " C": -3.0, " D": -3.0}
    metric = ul.exact_match("answer", "label", ignore_case=True)
    report = ul.evaluate(second, rows, metric, backend=ul.Echo(scores=scores))
    found = report.calibration()
    assert (found.accuracy, report.accuracy, found.unknown_labels) == (1.0, 1.0, 0)


def test_a_loaded_report_keeps_that_its_metric_ignores_case(tmp_path: Path) -> None:
    rows = [{"question": "x", "label": "a"}]
    metric = ul.exact_match("answer", "label", ignore_case=True)
    report = ul.evaluate(second, rows, metric, backend=ul.Echo())
    loaded = ul.EvaluationReport.load(report.save(tmp_path / "report.json"))
    assert loaded.ignore_case is True
    assert loaded.calibration().accuracy == report.accuracy


def test_a_model_that_scores_nothing_has_no_calibration() -> None:
    @ul.function
    def say(s, question):
        s += question + ul.gen("answer")

    report = ul.evaluate(say, data(2), MATCH, backend=ul.Echo())
    with pytest.raises(ul.ParameterError, match="no row has probabilities of choices"):
        report.calibration("answer", "label")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_calibration_is_drawn(suffix: str, calibrated: ul.EvaluationReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = Path(calibrated.calibration("answer", "label").plot(tmp_path / f"plot.{suffix}"))
    if suffix == "png":
        assert path.read_bytes()[:4] == b"\x89PNG"
    else:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    with pytest.raises(ul.ParameterError, match=r"\.svg, \.png, \.pdf"):
        calibrated.calibration("answer", "label").plot(tmp_path / "plot.txt")


def test_a_drawing_without_matplotlib_names_the_extra(
    calibrated: ul.EvaluationReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ul.MissingExtraError, match=r"pip install 'umbel\[plots\]'"):
        calibrated.calibration().plot(tmp_path / "plot.svg")
    assert not list(tmp_path.iterdir())
