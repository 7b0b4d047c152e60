"""`python -m benchmarks.constrained`: see `compare`."""

from .compare import main

raise SystemExit(main())
