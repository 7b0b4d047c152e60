"""Skeleton of thought: write the points first, then expand all of them in parallel."""

import umbel as ul

EXAMPLES = """\
Topic: How to stay healthy
Points: eat well; sleep enough; move every day
About eat well: Fresh vegetables, fruit and whole grains give the body what it needs.
About sleep enough: Seven to nine hours of sleep let the brain and the muscles recover.
About move every day: A short walk each day keeps the heart strong and the mind calm.

Topic: How to learn a language
Points: practise daily; read simple books; talk to people
About practise daily: Ten minutes every day teach more than two hours once a week.
About read simple books: Stories for children use common words and repeat them often.
About talk to people: Mistakes in a conversation are the ones that are never made again.

Topic: How to save money
Points: make a budget; cook at home; avoid debt
About make a budget: A list of what comes in and what goes out shows where money is lost.
About cook at home: A meal cooked at home costs a third of one in a restaurant.
About avoid debt: Interest on a credit card grows faster than any savings account.

"""


@ul.function
def write(s, topic):
    s += EXAMPLES + f"Topic: {topic}\nPoints:"
    s += ul.gen("points", max_tokens=32, stop="\n", temperature=0, frequency_penalty=1.0)
    points = [point.strip() for point in s["points"].split(";") if point.strip()][:4]
    branches = s.fork(max(len(points), 1))
    for point, branch in zip(points, branches):
        branch += f"\nAbout {point}:" + ul.gen(
            "paragraph", max_tokens=40, stop="\n", temperature=0, frequency_penalty=0.5
        )
    branches.join()
    return points


def main() -> None:
    state = write.run(topic="How to sleep better")
    for point, paragraph in zip(state.ret_value, state["paragraph"] if state.ret_value else []):
        print(f"{point}:{paragraph}")
    print(f"\n{state.usage.cached_tokens} of {state.usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
