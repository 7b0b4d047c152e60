"""A vision model small enough to lie in the repository, and the pictures that it was trained on."""
