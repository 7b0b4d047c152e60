"""Constraints built of parts: expressions with `+`, `|` and captures, their grammars, and the reading of their texts.

    Expression       what programs build (expression.py); its source is JSON, the tree of nodes.py
       └─▶ grammars.py    the grammar that our automata enforce
       └─▶ reading.py     what the captures of a text hold

It imports the language and the automata; interpreter and runtime import it.
"""
