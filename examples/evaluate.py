"""Multiple choice over a file: two prompts evaluated and compared row by row, and how certain the model may be."""

import csv
import tempfile
from pathlib import Path

import umbel as ul

CONTINENTS = ["Europe", "Asia", "Africa", "America"]
COUNTRIES = {
    "Europe": "Norway Portugal Hungary Ireland Bulgaria Latvia Denmark Albania",
    "Asia": "Nepal Vietnam Mongolia Japan Laos Kazakhstan Malaysia Bhutan",
    "Africa": "Kenya Ghana Zambia Morocco Senegal Botswana Rwanda Tunisia",
    "America": "Chile Cuba Bolivia Canada Honduras Paraguay Belize Ecuador",
}
SOLVED = """\
France lies in Europe.
India lies in Asia.
Egypt lies in Africa.
Peru lies in America.
"""


@ul.function
def bare(s, country):
    s += f"{country} lies in" + ul.select("answer", choices=[f" {name}" for name in CONTINENTS])


@ul.function
def with_examples(s, country):
    s += SOLVED + f"{country} lies in" + ul.select("answer", choices=[f" {name}" for name in CONTINENTS])


def main() -> None:
    right = ul.exact_match("answer", "continent")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "countries.csv")
        with source.open("w", newline="") as file:
            rows = [[country, name] for name, countries in COUNTRIES.items() for country in countries.split()]
            csv.writer(file).writerows([["country", "continent"], *rows])
        first = ul.evaluate(bare, source, right)
        second = ul.evaluate(with_examples, source, right)
        print(second, first.compare(second), sep="\n\n")
        for report in (first, second):
            print(f"\n{report.program}: {report.calibration('answer', 'continent', bins=5)}")
        first.save(Path(folder, "first.json"))  # a later prompt can be compared with it: umbel.EvaluationReport.load


if __name__ == "__main__":
    main()
