"""Lifts automata to the tokens of a vocabulary: masks, jump-forward, healing, and the cursor of a text."""
