"""The command line: its table of commands, help, completion, and the commands that need no other part."""
