"""Messages between a program, its gateway and the engine: frames, mailboxes, sockets, and signs of life."""
