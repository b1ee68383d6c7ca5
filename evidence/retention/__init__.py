"""How long evidence is kept, and its end by two people."""
