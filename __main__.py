"""`python -m umbel ...`: the command `umbel`, by a Python whose folder of scripts is not on PATH."""

from umbel.interpreter.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
