"""What a text has to be, on backends that enforce it and on those that do not."""
