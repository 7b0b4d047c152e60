"""`async def` programs: many at once on one event loop, no thread for any of them."""

import asyncio

import umbel as ul

EXAMPLES = (
    "English: good morning\nFrench: bonjour\nEnglish: thank you\nFrench: merci\nEnglish: goodbye\nFrench: au revoir\n"
)


@ul.function
async def translate(s, phrase):
    s += EXAMPLES + f"English: {phrase}\nFrench:"
    s += ul.gen("french", max_tokens=12, stop="\n", temperature=0)
    return (await s["french"]).strip()


async def translate_all(phrases):
    states = await asyncio.gather(*(translate.run_async(phrase=phrase) for phrase in phrases))
    return [state.ret_value for state in states]


def main() -> None:
    phrases = ["please", "yes", "good night"]
    for phrase, french in zip(phrases, asyncio.run(translate_all(phrases))):
        print(f"{phrase} -> {french}")


if __name__ == "__main__":
    main()
