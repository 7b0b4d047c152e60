"""Chat templates of others run within limits, in a process of their own, and end as TemplateError."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import umbel as ul
from umbel.interpreter.loop import streams
from umbel.lang.chat_template import ChatTemplate, Turn, chat_template_by_name
from umbel.lang.errors import TemplateError
from umbel.lang.templates import process
from umbel.lang.templates.process import TemplateChild, child_of

from .bombs import BOMBS

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
HARMLESS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateChild]:
    """A child of little patience in place of this process's."""
    gc.collect()  # of what other tests left, which would be counted as CPU time of this one
    child = TemplateChild(cpu_seconds=0.1)
    monkeypatch.setattr(process, "child_of", lambda process_id: child)
    yield child
    child.close()


def memory() -> int:
    """Bytes that this process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (index % 4 > 0)) for index, name in enumerate(BOMBS)]
)
def test_every_bomb_is_a_template_error(name: str, child: TemplateChild) -> None:
    before, taken = memory(), resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(BOMBS[name], name="hostile").render(MESSAGES)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    assert len(str(caught.value)) < 2_000
    assert memory() - before < 64 << 20
    assert spent.ru_utime - taken.ru_utime < 0.5, "the work is done elsewhere"
    assert ChatTemplate(HARMLESS).render(MESSAGES) == "[user]hi\n[assistant]hello\n", "the next one is not harmed"


def test_a_bomb_ends_within_its_cpu_time() -> None:
    child = TemplateChild()
    for name in ("nested loops", "power of a variable"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with pytest.raises(TemplateError, match="more than 1 s of CPU time"):
            child.ask(process.encoded(BOMBS[name], {"messages": MESSAGES}, 1000), 1000)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # it is gone, so it is counted
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


def test_a_bomb_goes_off_once(child: TemplateChild) -> None:
    chat = ChatTemplate(LOOPS + HARMLESS)
    for _ in range(20):
        with pytest.raises(TemplateError, match="CPU time"):
            chat.open([], "user")
    assert child.started == 1


def test_one_process_renders_all_templates(child: TemplateChild) -> None:
    for number in range(40):
        assert ChatTemplate(f"{number}{HARMLESS}").render(MESSAGES).startswith(f"{number}[user]hi")
    assert child.started == 1


def test_templates_that_ship_with_umbel_need_no_process(child: TemplateChild) -> None:
    assert not chat_template_by_name("llama-3-instruct").is_foreign
    ul.Echo().chat_template.render(MESSAGES)
    chat_template_by_name("gemma-it").render(MESSAGES)
    assert child.started == 0


def test_a_killed_child_is_replaced(child: TemplateChild) -> None:
    chat = ChatTemplate(HARMLESS)
    chat.render(MESSAGES)
    assert child.process_id is not None
    os.kill(child.process_id, signal.SIGKILL)
    assert chat.render(MESSAGES) == "[user]hi\n[assistant]hello\n"
    assert child.started == 2


def no_process(*_: object, **__: object) -> subprocess.Popen[bytes]:
    raise OSError(errno.EMFILE, "Too many open files")


def no_answer(*_: object, **__: object) -> bytes:
    raise EOFError("its pipe is closed")


USES: list[Callable[[ChatTemplate], object]] = [
    lambda chat: chat.render(MESSAGES),
    lambda chat: chat.open([], "user"),
    lambda chat: chat.open([], "system"),
    lambda chat: chat.open([Turn("user", "hi")], "assistant"),
    lambda chat: chat.close([Turn("user", "hi")]),
    lambda chat: chat.lead([Turn("user", "hi")], "assistant"),
    lambda chat: chat.shows([Turn("user", "hi")]),
    lambda chat: chat.trims,
]
FAULTS = [("subprocess.Popen", no_process, "does not start"), ("_read", no_answer, "ended")]


@pytest.mark.parametrize(("where", "fault", "told"), FAULTS, ids=[where for where, _, _ in FAULTS])
def test_a_child_that_gives_no_answer_says_nothing_of_the_template(
    child: TemplateChild, where: str, fault: Callable[..., object], told: str
) -> None:
    for use in USES:
        expected = use(ChatTemplate(HARMLESS))
        chat = ChatTemplate(HARMLESS, checked=False)
        child.close()
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(f"umbel.lang.templates.process.{where}", fault)
            with pytest.raises(TemplateError, match=told):
                use(chat)
        assert use(chat) == expected
        assert chat.render(MESSAGES) == "[user]hi\n[assistant]hello\n"


def test_a_child_that_was_stopped_holds_no_caller_for_ever(
    child: TemplateChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatTemplate(HARMLESS)
    stopped = child.process_id
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    patience = process.SILENCE_SECONDS
    monkeypatch.setattr(process, "SILENCE_SECONDS", 0.2)

    def render() -> None:  # more than a pipe holds; a new child may be too slow for this little patience
        with contextlib.suppress(TemplateError):
            chat.render([{"role": "user", "content": "long " * 100_000}])

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join(60.0)
    held = thread.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGKILL)
    assert not held
    monkeypatch.setattr(process, "SILENCE_SECONDS", patience)
    assert chat.render(MESSAGES) == "[user]hi\n[assistant]hello\n"


def test_threads_get_their_own_answers(child: TemplateChild) -> None:
    wrong: list[str] = []

    def use(number: int) -> None:
        chat = ChatTemplate(f"{number}:{HARMLESS}")
        for turn in range(20):
            text = chat.render([{"role": "user", "content": f"{number}/{turn}"}])
            if text != f"{number}:[user]{number}/{turn}\n":
                wrong.append(text)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert child.started == 1


@pytest.mark.processes
def test_a_forked_process_has_a_child_of_its_own() -> None:
    """Both sides of a fork render at once."""
    code = (
        "import os\n"
        "from umbel.lang.chat_template import ChatTemplate\n"
        f"chat = ChatTemplate({HARMLESS!r})\n"
        "say = lambda who, i: chat.render([{'role': 'user', 'content': f'{who}{i}'}])\n"
        "say('before', 0)\n"
        "pid = os.fork()\n"
        "who = 'parent' if pid else 'fork'\n"
        "assert all(say(who, i) == f'[user]{who}{i}\\n' for i in range(300))\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
        "else: os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", code], check=True, timeout=120)


@pytest.mark.processes
def test_the_child_ends_with_its_parent() -> None:
    code = (
        "import os, sys\n"
        "from umbel.lang.chat_template import ChatTemplate\n"
        "from umbel.lang.templates.process import child_of\n"
        f"ChatTemplate({HARMLESS!r})\n"
        "print(child_of(os.getpid()).process_id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        os.kill(process_id, 0)
        parent.kill()
    for _ in range(100_000):
        try:
            os.kill(process_id, 0)
            with open(f"/proc/{process_id}/stat", encoding="ascii") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":  # the container's first process does not reap
                    return
        except (ProcessLookupError, FileNotFoundError):
            return
        os.sched_yield()
    pytest.fail("the child outlives its parent")


def test_the_child_is_told_no_secrets(child: TemplateChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    ChatTemplate(HARMLESS)
    with open(f"/proc/{child.process_id}/environ", "rb") as file:
        assert b"sk-canary" not in file.read()


def test_the_loop_stays_awake_while_a_template_is_rendered(child: TemplateChild) -> None:
    """The loop makes many turns during a role that costs all the CPU time that a template may have."""

    @ul.function
    def talk(s: ul.State) -> None:
        with s.user():
            s += "hi"
        with s.assistant():
            s += ul.gen("x", max_tokens=4)

    backend = ul.Echo(chat_template=ChatTemplate(LOOPS + HARMLESS, checked=False))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: talk.run(backend=backend).text())
        turns = 0
        while not running.done():
            streams.spawn(asyncio.sleep(0)).result()
            turns += 1
    with pytest.raises(TemplateError, match="CPU time"):
        running.result()
    assert turns > 20


def test_a_role_that_was_opened_before_waits_for_nobody(child: TemplateChild) -> None:
    @ul.function
    def talk(s: ul.State) -> None:
        for number in range(3):
            with s.user():
                s += "hi"
            with s.assistant():
                s += ul.gen(f"x{number}", max_tokens=4)

    chat = ChatTemplate(HARMLESS)
    turns = [Turn("user", "hi"), Turn("assistant", "hi"), Turn("user", "hi")]
    assert not chat.opens_at_once(turns, "assistant")
    said = talk.run(backend=ul.Echo(chat_template=chat)).text()
    assert all(chat.opens_at_once(turns[:length], role) for length, role in enumerate(["user", "assistant"] * 2))
    child.close()
    asked = child.started
    for length, role in enumerate(["user", "assistant"] * 2):
        chat.open(turns[:length], role)
        chat.lead(turns[:length], role)
        assert chat.trims is False
    assert child.started == asked
    assert talk.run(backend=ul.Echo(chat_template=chat)).text() == said


def test_content_that_is_repeated_is_bounded(child: TemplateChild) -> None:
    chat = ChatTemplate("{% for m in messages %}{% for i in range(5000) %}{{ m.content }}{% endfor %}{% endfor %}")
    turns = [Turn("user", "x" * 100_000)]
    with pytest.raises(TemplateError, match="repeats what was said"):
        chat.close(turns)


def test_marks_of_turns_cannot_be_forged(child: TemplateChild) -> None:
    for number in ("7", "0" * 5000, "9" * 5000, "00"):
        chat = ChatTemplate(f"\ue000{number}\ue001{HARMLESS}")
        with pytest.raises(TemplateError, match="mark of a turn that is not there"):
            chat.open([], "user")


def test_long_conversations_are_no_bombs(child: TemplateChild) -> None:
    said = "word " * 600_000
    assert len(ChatTemplate(HARMLESS).render([{"role": "user", "content": said}])) > 3_000_000


def test_a_turn_that_is_left_out_is_refused() -> None:
    users = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(TemplateError, match=r"leaves out turn 0 \(system\)"):
        users.open([Turn("system", "Be brief."), Turn("user", "hi")][:1], "user")
    with pytest.raises(TemplateError, match=r"leaves out turn 1 \(assistant\)"):
        users.open([Turn("user", "hi"), Turn("assistant", "hello")], "user")


def test_options_are_plain_data() -> None:
    with pytest.raises(TemplateError, match="no plain data"):
        ChatTemplate(HARMLESS, options={"tool": object()}).render(MESSAGES)
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(TemplateError, match="no plain data"):
        ChatTemplate(HARMLESS, options={"tools": circle}).render(MESSAGES)


def test_this_process_keeps_one_child() -> None:
    ChatTemplate(HARMLESS).render(MESSAGES)
    started = child_of(os.getpid()).started
    gc.collect()
    ChatTemplate("x" + HARMLESS).render(MESSAGES)
    assert child_of(os.getpid()).started == started
