"""Shows graphs to people: as a listing, as DOT, and as a picture."""
