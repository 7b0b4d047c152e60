"""Names of frameworks under umbel's own: `umbel.dspy` is the module `dspy` of this folder (see `umbel.__path__`).

No module of the root has these names: a checkout on Python's path would then hide the frameworks themselves.
"""
