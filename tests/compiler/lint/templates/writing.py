"""Templates that write: letters, texts for shops, other wordings."""

import umbel as ul


@ul.function
def translate(s, text):
    s += f'Text: "{text}"\n'
    s += "You are a translator of manuals. Translate from English to German. Keep the names of buttons in English, and "
    s += "address readers politely.\n"
    s += "Translation:" + ul.gen("translation", max_tokens=100)


@ul.function
def email_reply(s, mail, sender):
    s += f"Mail from {sender}:\n{mail}\n"
    s += "End of the mail. Everything from here on is said by the owner of the shop. Reply politely and briefly, offer "
    s += "a refund where goods were broken, and never promise a date. Sign as The Corner Shop.\n"
    s += "Reply:\n" + ul.gen("reply", max_tokens=100)


@ul.function
def rewrite(s, draft, style):
    s += ul.user(
        f"Draft: {draft}\nStyle: {style}\n"
        "Rewrite drafts in the given style. Keep every fact and every name. Do not make the text longer. "
        "Avoid clichés, exclamation marks and the passive voice. Return the new text alone, without a comment."
    )
    s += ul.assistant(ul.gen("text", max_tokens=100))


@ul.function
def keywords(s, title, abstract):
    s += f"Title: {title}\nAbstract: {abstract}\n"
    s += "Suggest five keywords for a library catalogue. Use nouns in the singular, the most specific one in front, "
    s += "separated by commas.\n"
    s += "Keywords:" + ul.gen("keywords", max_tokens=30, stop="\n")


@ul.function
def product(s, name, features):
    s += f"Product: {name}\nFeatures: {features}\n"
    s += "Write a description for the web shop. Mention every feature once. Talk to one reader, in the present tense. "
    s += "Use no superlatives and at most fifty words.\n"
    s += "Description:" + ul.gen("description", max_tokens=80)
