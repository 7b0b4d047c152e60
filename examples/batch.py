"""A batch of programs: one progress bar, results in order, failures kept apart."""

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
    states = classify.run_batch([{"review": review} for review in [*REVIEWS, ""]], progress_bar=True, on_error="return")
    for review, state in zip([*REVIEWS, ""], states):
        if isinstance(state, ul.Failure):
            print(f"   failed  {state.error!r}")
        else:
            print(f"{state['sentiment'].strip():>9}  {review}")


if __name__ == "__main__":
    main()
