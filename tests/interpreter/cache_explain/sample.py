"""Statements to be looked at by test_statements.py; nothing here runs. Each has a name in its comment."""

# ruff: noqa: F821  # the names stand for whatever a program has


def program(s, question, items, flag):
    s += f"It is {now()}.\n" + question + gen("x")  # sum
    s += user("Q: " + question + "\nA:")  # role
    s += question  # name
    s += user(question)  # role of a name
    s += "item " + str(items[0]) + "\n"  # call
    s += "nothing but a constant"  # constant
    s += (
        "several lines "
        f"of {question} and {items}"  # lines
    )
    s.user(f"As a method: {question}")  # method
    with s.copy() as branch:  # block
        branch += f"Inside: {items[1]}!"  # inside
    for item in items:  # loop
        s += item + ", "  # looped
    forks = s.fork(2)
    forks += lambda index: f"Branch {index}: " + gen("y")  # lambda
    s += [f"<{question}>", gen("z")]  # list
    s += "yes " + question if flag else "no " + items[2]  # conditional
    s += f"{question}{items}"  # side by side
    s += items + question + gen("w", max_tokens=8)  # counted
    s += f"{question}, {question}"  # twice
