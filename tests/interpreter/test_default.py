"""Which backend a program runs on when nobody says."""

import umbel as ul
from umbel.interpreter.run import chosen_backend


def test_where_nobody_chose_programs_run_on_the_embedded_model() -> None:
    ul.set_default_backend(None)
    try:
        backend = chosen_backend()
        assert isinstance(backend, ul.Runtime)
        assert backend.options.model == "default"
        assert chosen_backend() is backend
    finally:
        ul.set_default_backend(None)
