"""Models that see: towers that make features of pictures, and the projectors that make them rows of a decoder."""
