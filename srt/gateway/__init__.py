"""The gateway process: sockets, validation, tokenization, supervision of engines."""
