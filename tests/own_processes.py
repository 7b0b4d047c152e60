"""Finds the processes of a test's runtimes."""

import psutil


def own_processes(module: str) -> list[psutil.Process]:
    """Returns the live processes that this one has started and that name a module in their command line.

    Those of a server process are left out: one is shared by the tests of a session.
    """
    found = []
    for child in psutil.Process().children():
        try:
            if "serve" not in child.cmdline():
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return [each for each in found if _names(each, module)]


def _names(process: psutil.Process, module: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and module in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
