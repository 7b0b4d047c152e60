"""ReAct: the model thinks, calls real Python tools, reads what they return, and answers."""

import ast
import operator

import umbel as ul

EXAMPLES = """\
Question: What is 15 percent of 80?
Thought: I need to multiply 80 by 0.15.
Action: calculate[80 * 0.15]
Observation: 12.0
Thought: I know the answer.
Action: finish[12]

Question: How many people live in Norway?
Thought: I need to look up the population of Norway.
Action: population[Norway]
Observation: 5600000
Thought: I know the answer.
Action: finish[5600000]

"""
PEOPLE = {"iceland": 390_000, "norway": 5_600_000, "sweden": 10_600_000, "denmark": 6_000_000, "finland": 5_600_000}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(text: str) -> str:
    """Arithmetic on numbers, nothing else."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case _:
                raise ValueError(text)

    try:
        return str(value(ast.parse(text, mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return f"cannot calculate {text!r}"


def population(country: str) -> str:
    return str(PEOPLE.get(country.strip().lower(), f"unknown country {country!r}"))


TOOLS = {"calculate": calculate, "population": population}


@ul.function
def agent(s, question, max_steps=4):
    s += EXAMPLES + f"Question: {question}\n"
    for _ in range(max_steps):
        s += "Thought:" + ul.gen("thought", max_tokens=32, stop="\n", temperature=0) + "\n"
        s += "Action: " + ul.select("tool", choices=[*TOOLS, "finish"]) + "["
        s += ul.gen("argument", max_tokens=16, stop=["]", "\n"], temperature=0) + "]\n"
        if s["tool"] == "finish":
            return s["argument"]
        s += f"Observation: {TOOLS[s['tool']](s['argument'])}\n"
    return None


def main() -> None:
    for question in ("How many people live in Iceland?", "What is 20 percent of 60?"):
        state = agent.run(question=question)
        print(state.text()[len(EXAMPLES) :].strip())
        print(f"=> {state.ret_value}\n")


if __name__ == "__main__":
    main()
