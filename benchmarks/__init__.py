"""The paper's workloads and ablations, on this machine: `python -m benchmarks`, `make bench`.

Not part of the installed package. `workload.py` reads the files, `replay/` runs them through the language or on a peer,
`measure.py` times a run, `bench.py` says which configurations meet, `record/` writes what was found. Every other module
here is a command of its own; README.md lists them.
"""
