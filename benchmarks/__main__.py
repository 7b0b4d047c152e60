"""`python -m benchmarks`: the same as `umbel bench`."""

from .main import main

raise SystemExit(main())
