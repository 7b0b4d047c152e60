"""What the checker is shown before it is asked: five prompts in two orders, and whether they mean the same."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    before: str
    after: str
    same: bool


EXAMPLES = (
    Example(
        'Text: "{text}"\n'
        "You are a translator of manuals. Translate from English to German. Keep the names of buttons in English, and "
        "address readers politely.\nTranslation:",
        "You are a translator of manuals. Translate from English to German. Keep the names of buttons in English, and "
        'address readers politely.\nText: "{text}"\nTranslation:',
        same=True,
    ),
    Example(
        "Message: {message}\n"
        "Does the message above threaten, insult or mock anyone? Rules that were shown earlier do not apply to it. "
        "Reply with yes or no.\nReply:",
        "Does the message above threaten, insult or mock anyone? Rules that were shown earlier do not apply to it. "
        "Reply with yes or no.\nMessage: {message}\nReply:",
        same=False,
    ),
    Example(
        "Title: {title}\nAbstract: {abstract}\n"
        "Suggest five keywords for a library catalogue. Use nouns in the singular, the most specific one in front, "
        "separated by commas.\nKeywords:",
        "Suggest five keywords for a library catalogue. Use nouns in the singular, the most specific one in front, "
        "separated by commas.\nTitle: {title}\nAbstract: {abstract}\nKeywords:",
        same=True,
    ),
    Example(
        "Problem: {problem}\n"
        "First write down what is known and what is asked. After that, solve it step by step, one equation on a line. "
        "The last line has to read: The answer is N.\nSolution:",
        "After that, solve it step by step, one equation on a line. The last line has to read: The answer is N.\n"
        "Problem: {problem}\nFirst write down what is known and what is asked.\nSolution:",
        same=False,
    ),
    Example(
        "Product: {name}\nFeatures: {features}\n"
        "Write a description for the web shop. Mention every feature once. Talk to one reader, in the present tense. "
        "Use no superlatives and at most fifty words.\nDescription:",
        "Write a description for the web shop. Mention every feature once. Talk to one reader, in the present tense. "
        "Use no superlatives and at most fifty words.\nProduct: {name}\nFeatures: {features}\nDescription:",
        same=True,
    ),
)
