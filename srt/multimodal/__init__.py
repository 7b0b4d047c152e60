"""Pictures in prompts: decoded and measured in the gateway, kept by number, computed once by the engine.

A picture's place in a token sequence is a run of ids beyond every vocabulary, `PICTURE_BASE` plus a number that belongs
to its pixels and the request's salt: so the radix tree, scores, hints and forks compare pictures as they compare text.
"""
