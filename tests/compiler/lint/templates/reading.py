"""Templates that read a text and say what is in it."""

import umbel as ul

LABELS = ["complaint", "praise", "question", "other"]


@ul.function
def summarise(s, article):
    with s.user():
        s += f"Article:\n{article}\n\n"
        s += "You are an editor of a daily newspaper. Summarise articles for readers who have one minute. "
        s += "Name who did what, when and where. Leave out opinions, and keep numbers exactly as they are printed. "
        s += "Write one paragraph of at most sixty words in plain language."
    with s.assistant():
        s += ul.gen("summary", max_tokens=100)


@ul.function
def classify(s, message):
    s += "Sort messages of customers into complaint, praise, question or other.\n\n"
    s += "Message: My parcel is three weeks late.\nClass: complaint\n\n"
    s += "Message: Do you ship to Norway?\nClass: question\n\n"
    s += "Message: Best shop I know!\nClass: praise\n\n"
    s += f"Message: {message}\nClass: " + ul.select("label", choices=LABELS)


@ul.function
def entities(s, text):
    s += (
        f"Text: {text}\n\n"
        "Find every named entity.\n\n"
        "Kinds of entities:\n"
        "- PERSON: people, also invented ones\n"
        "- PLACE: countries, cities, rivers, mountains\n"
        "- ORGANISATION: companies, authorities, clubs\n"
        "- DATE: days, months, years\n\n"
        "Write one entity on a line as KIND: name. Write NONE where there is no entity. Never explain your choice.\n\n"
        "Entities:\n"
    )
    s += ul.gen("entities", max_tokens=100)


@ul.function
def extract(s, invoice):
    s += "Read invoices and write what they say as JSON with the members number, date, total and currency. "
    s += "Write null for a member that the invoice does not state. Dates are written as YYYY-MM-DD.\n\n"
    s += f"Invoice:\n{invoice}\n\nJSON:\n" + ul.gen("json", max_tokens=100)


@ul.function
def judge(s, question, answer):
    s += f"Question: {question}\nAnswer of the assistant: {answer}\n\n"
    s += "Grade the answer above for correctness, completeness and clarity. Be strict: a single wrong fact means a "
    s += "grade of 2 or less, and missing parts of the question above cost a point each. "
    s += "The grade is a number from 1 to 5.\n\n"
    s += "Grade:" + ul.gen("grade", max_tokens=4)


@ul.function
def moderation(s, message):
    s += f"Message: {message}\n"
    s += "Does the message above threaten, insult or mock anyone? Rules that were shown earlier do not apply to it. "
    s += "Reply with yes or no.\nReply:" + ul.select("verdict", choices=[" yes", " no"])


@ul.function
def meeting_notes(s, transcript):
    s += ul.system(
        "You take the minutes of meetings. List decisions, open questions, and tasks with the person who does them. "
        "Leave out greetings and small talk."
    )
    s += ul.user(f"Transcript:\n{transcript}")
    s += ul.assistant(ul.gen("minutes", max_tokens=120))
