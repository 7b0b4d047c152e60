"""What of a schema the backend could not enforce, looked at when the text is there: `gen(allow_unenforced=True)`."""

import importlib.util
import itertools
import json

from ..lang.errors import MissingExtraError

MOST = 10  # violations that are told


def check_installed() -> None:
    """Raises MissingExtraError without the package that validates."""
    if importlib.util.find_spec("jsonschema") is None:
        raise MissingExtraError("jsonschema", "validation")


def violations(schema: str, text: str) -> list[str]:
    """What `text` breaks of a JSON Schema, one sentence each; formats are checked, references to elsewhere fail.

    Args:
        schema: as JSON text.
    """
    check_installed()
    import jsonschema  # type: ignore[import-untyped]
    import referencing

    try:
        instance = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [f"the text is no JSON: {error}"]
    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    # A registry of our own: without one the package would fetch what it does not know.
    validator = kind(parsed, registry=referencing.Registry(), format_checker=jsonschema.FormatChecker())
    found = []
    try:
        for problem in itertools.islice(validator.iter_errors(instance), MOST):
            found.append(f"{problem.json_path}: {problem.message[:200]}")
    except (referencing.exceptions.Unresolvable, RecursionError) as error:
        found.append(f"the schema cannot be applied: {error}")
    return found
