"""Pictures in prompts: decoded and measured in the gateway, kept by number, computed once by the engine.

In a token sequence a picture is a run of ids beyond every vocabulary: `PICTURE_BASE` plus a number for its pixels and
the request's salt. So the radix tree, scores, hints and forks compare pictures as they compare text.
"""
