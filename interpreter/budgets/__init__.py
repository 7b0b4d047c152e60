"""What runs may cost, what they did cost, and what models charge."""
