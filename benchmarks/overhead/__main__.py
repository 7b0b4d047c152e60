"""`python -m benchmarks.overhead`: see `cost`."""

from .cost import main

main()
