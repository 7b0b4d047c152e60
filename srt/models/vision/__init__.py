"""Vision models: towers compute features of pictures, and projectors map them to rows of a decoder."""
