"""`python -m benchmarks`: see `main`."""

from .main import main

raise SystemExit(main())
