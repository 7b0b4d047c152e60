"""Hides what Windows lacks, then runs what should work there: imports, programs, journals, hosted models.

A child of test_no_posix.py: `python no_posix.py FOLDER`. It prints one line of JSON.
"""

import asyncio  # noqa: F401  (before msvcrt is there: what it imports asks for that)
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
from types import ModuleType

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
OF_OS = (
    "O_CLOEXEC", "fork", "forkpty", "getpgid", "getuid", "geteuid", "getsid", "killpg", "posix_fallocate",
    "posix_fadvise", "pread", "pwrite", "register_at_fork", "sched_getaffinity", "set_blocking", "setsid",
    "statvfs", "sysconf", "wait4",
)  # fmt: skip
OF_SIGNAL = (
    "ITIMER_PROF",
    "SIGALRM",
    "SIGHUP",
    "SIGPROF",
    "SIGSTOP",
    "SIGUSR1",
    "SIGXCPU",
    "setitimer",
    "siginterrupt",
)

PARTS = ("lang", "interpreter", "compiler", "fsm")
BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# A child of this process is another process of the same Python: it, too, has to do without.
SITE = f"""
import os, select, signal, sys
sys.modules.update(dict.fromkeys({MODULES!r}))
for module, names in ((os, {OF_OS!r}), (signal, {OF_SIGNAL!r}), (select, ("poll", "epoll"))):
    for name in names:
        vars(module).pop(name, None)
"""


class Locks(ModuleType):
    """Stands in for msvcrt: locks of files, each held until its descriptor is closed."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.held: dict[int, tuple[int, int]] = {}  # descriptor → inode and the place of the byte

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        wanted = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        for other, held in list(self.held.items()):
            try:
                alive = os.fstat(other).st_ino == held[0]
            except OSError:
                alive = False
            if alive and other != descriptor and held == wanted:
                raise PermissionError("locked")
        self.held[descriptor] = wanted


def hide(folder: str) -> None:
    sys.modules["msvcrt"] = Locks()
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL), (select, ("poll", "epoll"))):
        for name in names:
            vars(module).pop(name, None)
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(SITE)
    sys.path.insert(0, folder)


def imported() -> int:
    """Imports every module of the parts that need no runtime → how many."""
    import umbel

    count = 0
    for part in PARTS:
        package = importlib.import_module(f"{umbel.__name__}.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
            count += 1
    return count


def main(folder: str) -> dict[str, object]:
    hide(folder)
    seen: dict[str, object] = {"modules": imported()}
    import umbel as ul
    from umbel.testing import FakeOpenAI

    @ul.function
    def program(s: ul.State, what: str) -> None:
        s += ul.user(f"What is {what}?")
        forks = s.fork(2)
        forks += ul.assistant(ul.gen("answer", max_tokens=8))
        s += ul.assistant(" and ".join(fork["answer"] for fork in forks) + ul.select("verdict", choices=["yes", "no"]))

    @ul.function
    def asked(s: ul.State, what: str) -> None:
        s += ul.user(f"What is {what}?") + ul.assistant(ul.gen("answer", max_tokens=8))

    @ul.function
    def twice(s: ul.State) -> None:
        try:
            twice.run(backend=echo, journal=second)
        except ul.JournalError as error:
            seen["locked"] = str(error)
        s += "once"

    journal, second = os.path.join(folder, "run.jsonl"), os.path.join(folder, "second.jsonl")
    echo = ul.Echo({"What is": "an umbel"})
    batch = program.run_batch([{"what": "a"}, {"what": "b"}], backend=echo, journal=journal)
    again = program.run_batch([{"what": "a"}, {"what": "b"}], backend=ul.Echo(), journal=journal)
    seen["batch"] = [state["verdict"] for state in batch]
    seen["resumed"] = [state.text() for state in again] == [state.text() for state in batch]
    seen["compiled"] = program.compile().run(what="c", backend=echo)["verdict"]
    twice.run(backend=echo, journal=second)
    page = os.path.join(folder, "run.html")
    batch[0].save(page)
    seen["saved"] = os.path.getsize(page) > 1000
    with FakeOpenAI({"What is": "an umbel"}) as server:
        hosted = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        seen["hosted"] = asked.run(what="d", backend=hosted)["answer"]
    chat = ul.ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    seen["template"] = chat.render([{"role": "user", "content": "hi"}])
    try:
        ul.ChatTemplate(BOMB).render([{"role": "user", "content": "hi"}])
    except ul.TemplateError as error:
        seen["bomb"] = str(error)
    try:
        asked.run(what="f", backend=ul.Runtime())["answer"]
    except ul.BackendError as error:
        seen["runtime"] = str(error)
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
