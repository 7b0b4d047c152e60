"""Constraints over the tokens of a vocabulary: masks, jump-forward, healing, and where one text is."""
