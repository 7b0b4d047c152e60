"""Intersections and differences of languages, as automata over characters; grammars without what admits nothing."""
