"""Streaming: read the text while it is generated, one variable or everything."""

import umbel as ul


@ul.function
def story(s, hero):
    s += f"Once upon a time there was a {hero} who lived in a small house near the forest. One morning"
    s += ul.gen("beginning", max_tokens=40, temperature=0, stop=[".", "\n"])
    s += ". In the end,"
    s += ul.gen("ending", max_tokens=40, temperature=0, stop=[".", "\n"])
    s += "."


def main() -> None:
    state = story.run(hero="fox", stream=True)  # returns at once; the program runs in the background
    for piece in state.text_iter():
        print(piece, end="", flush=True)
    print("\n---")
    print("The ending alone:", "".join(state.text_iter("ending")).strip())


if __name__ == "__main__":
    main()
