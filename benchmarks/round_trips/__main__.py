"""`python -m benchmarks.round_trips`: see `compare`."""

from .compare import main

main()
