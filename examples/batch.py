"""A batch of programs: rows of a file in, results into a file as they come, failures kept apart, one progress bar."""

import csv
import tempfile
from pathlib import Path

import umbel as ul

EXAMPLES = """\
Review: The food was cold and the waiter rude.
Sentiment: negative
Review: A lovely evening, we will come again!
Sentiment: positive
Review: The screen broke after two days.
Sentiment: negative
Review: It does what it should, and the battery lasts for ever.
Sentiment: positive
"""
REVIEWS = [
    "Best headphones I ever had.",
    "It stopped working after a week.",
    "The staff was friendly and the room was clean.",
    "A waste of money.",
    "I would buy it again at once.",
    "Terrible service, we waited for an hour.",
]


@ul.function
def classify(s, review):
    if not review:
        raise ValueError("an empty review")
    s += EXAMPLES + f"Review: {review}\nSentiment:"
    s += ul.select("sentiment", choices=[" positive", " negative"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, results = Path(folder, "reviews.csv"), Path(folder, "results.jsonl")
        with source.open("w", newline="") as file:
            csv.writer(file).writerows([["id", "review"], *enumerate([*REVIEWS, ""])])
        done = classify.run_batch(source, output=results, progress=True)  # if_exists="resume" goes on after a crash
        for row in sorted(done.rows(), key=lambda row: row["row"]):
            print(f"{row['sentiment'].strip():>9}  {row['review']}")
        for failure in done.failures():
            print(f"   failed  id {failure['input']['id']}: {failure['error']}({failure['message']!r})")


if __name__ == "__main__":
    main()
