"""Results for people: in a terminal, as JSON."""
