"""Templates that answer and explain: some as they are found in public, some as they should be."""

import umbel as ul


@ul.function
def rag_answer(s, question, context):
    s += f"Question: {question}\n\nContext:\n{context}\n\n"
    s += "You are a helpful assistant that answers questions with the help of retrieved documents. "
    s += "Rely on facts of the context alone. If the context does not contain the answer, reply exactly: I don't know. "
    s += "Quote the number of the document after every statement, in square brackets. "
    s += "Write at most three sentences.\n\n"
    s += "Answer:" + ul.gen("answer", max_tokens=100)


@ul.function
def maths(s, problem):
    s += f"Problem: {problem}\n"
    s += "First write down what is known and what is asked. After that, solve it step by step, one equation on a line. "
    s += "The last line has to read: The answer is N.\n"
    s += "Solution:" + ul.gen("solution", max_tokens=200)


@ul.function
def tutoring(s, number, total, exercise, attempt):
    s += f"Exercise {number} of {total}.\n"
    s += "You are a patient tutor for pupils of about twelve years. Never tell the solution. "
    s += "Praise what is right in an attempt, name one mistake, and ask one question that leads towards the solution. "
    s += "Use words that a twelve-year-old knows, and no more than four sentences.\n"
    s += f"Task: {exercise}\nAttempt: {attempt}\nTutor:"
    s += ul.gen("hint", max_tokens=80)


@ul.function
def persona(s, player, utterance):
    s += f"{player} enters the great hall and says: {utterance}\n"
    s += "The candles go out. Somewhere a door slams. A cold voice fills the room and demands a riddle. "
    s += "Continue as the game master in three sentences, in the present tense, and leave the choice to the player.\n"
    s += "Game master:" + ul.gen("scene", max_tokens=80)
