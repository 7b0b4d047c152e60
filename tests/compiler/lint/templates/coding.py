"""Templates about programs, and an agent's preamble with what changes at every run."""

import datetime
import uuid

import umbel as ul


@ul.function
def sql(s, question, schema):
    s += "Question: " + question + "\n\n"
    s += "Write one SQL query for PostgreSQL 15. Use only tables and columns of the schema. Join with explicit "
    s += "conditions, give every column of the result a name, and limit the result to 100 rows. "
    s += "Return the query alone, without a comment.\n\n"
    s += "Schema:\n" + schema + "\n\n"
    s += "Query:\n" + ul.gen("query", max_tokens=120)


@ul.function
def code_review(s, diff):
    s += f"```diff\n{diff}\n```\n\n"
    s += "You review changes to a web service written in Python.\n\n"
    s += "Look for\n1. mistakes that lose data or leak it\n2. missing checks of what users send\n"
    s += "3. tests that would pass without the change\n4. names that mislead\n\n"
    s += "Report at most five remarks, each with the line it is about and what to write instead. "
    s += "Say LGTM where there is nothing to remark.\n\n"
    s += "Review:\n" + ul.gen("review", max_tokens=150)


@ul.function
def unit_tests(s, code):
    s += "Write tests with pytest. Test one fact per function, name functions after the fact, and use no mocks.\n\n"
    s += f"```python\n{code}\n```\n\nTests:\n```python\n"
    s += ul.gen("tests", max_tokens=200, stop="```")


@ul.function
def dated_agent(s, task):
    session = uuid.uuid4()
    s += f"Session {session}, started {datetime.datetime.now():%Y-%m-%d %H:%M:%S}.\n"
    s += "You are an assistant with a browser. Open one page at a time, and quote the address of every page you use. "
    s += "Never type passwords, never buy anything, and ask when an instruction is unclear.\n"
    s += f"Task: {task}\n"
    s += "Action:" + ul.gen("action", max_tokens=40, stop="\n")
