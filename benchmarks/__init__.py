"""The paper's workloads and ablations, on this machine: `python -m benchmarks`, `make bench`.

Not part of the installed package. `workload.py` reads the files, `program.py` runs them through the language,
`measure.py` times a run, `plan.py` says which configurations meet, `report.py` and `plots.py` write what was found.
"""
