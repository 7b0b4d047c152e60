"""No signature, docstring, help page or `repr` of umbel holds a value of the environment, where keys are kept.

`help()`, the `?` of notebooks and builders of documentation print the defaults of parameters. The walk goes through all
modules that can be imported here, in a process of its own whose environment has keys to look for.
"""

import os
import subprocess
import sys

CANARY = "canary-4f1d9c"

WALK = f"""
import importlib, inspect, pkgutil, pydoc, sys
import umbel

CANARY = {CANARY!r}
modules, unimportable = [umbel], []
for found in pkgutil.walk_packages(umbel.__path__, "umbel."):
    part = found.name.split(".")[1]
    if part in ("lang", "fsm", "interpreter", "compiler", "srt", "server", "compat", "testing"):
        try:
            modules.append(importlib.import_module(found.name))
        except (ImportError, OSError, AttributeError) as error:  # a package for another device
            unimportable.append(found.name)

def members(owner):
    for name, value in list(vars(owner).items()):
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            yield f"{{name}}.fget", value.fget
        elif inspect.isroutine(value) or inspect.isclass(value):
            yield name, value

def texts(value):
    yield "repr", repr(value)
    yield "doc", value.__doc__ or ""
    for part in ("__defaults__", "__kwdefaults__"):
        yield part, repr(getattr(value, part, None))
    try:
        yield "signature", str(inspect.signature(value))
    except (ValueError, TypeError):
        pass

seen, leaks, checked = set(), [], 0
def look(path, value):
    global checked
    if id(value) in seen or not str(getattr(value, "__module__", "")).startswith("umbel"):
        return
    seen.add(id(value))
    checked += 1
    leaks.extend(f"{{path}}: {{what}}" for what, text in texts(value) if CANARY in text)
    if inspect.isclass(value):
        for name, member in members(value):
            look(f"{{path}}.{{name}}", member)

for module in modules:
    for name, value in members(module):
        look(f"{{module.__name__}}.{{name}}", value)
    leaks.extend(
        f"{{module.__name__}}.{{name}}: its repr" for name, value in vars(module).items()
        if type(value).__module__ not in ("os", "builtins") and not inspect.ismodule(value) and CANARY in repr(value)
    )
for name in umbel.__all__:
    value = getattr(umbel, name)
    if not isinstance(value, str) and CANARY in pydoc.render_doc(value, renderer=pydoc.plaintext):
        leaks.append(f"help(umbel.{{name}})")
for instance in (umbel.OpenAI("gpt-4o"), umbel.Anthropic("claude-haiku-4-5"), umbel.Echo()):
    if CANARY in repr(instance) or CANARY in repr(instance.capabilities):
        leaks.append(f"repr of {{type(instance).__name__}}()")
print(checked, len(modules), " ".join(unimportable), file=sys.stderr)
print("\\n".join(leaks))
"""


def test_no_public_signature_docstring_or_repr_holds_a_value_of_the_environment() -> None:
    keys = {name: f"sk-{CANARY}-{name}" for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "UMBEL_SOMETHING", "TOKEN")}
    done = subprocess.run(
        [sys.executable, "-c", WALK], env={**os.environ, **keys}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n") == ["", ""], done.stdout
    checked, modules, *_ = done.stderr.splitlines()[-1].split()
    assert int(checked) > 3000, done.stderr[-500:]
    assert int(modules) > 250, done.stderr[-500:]
