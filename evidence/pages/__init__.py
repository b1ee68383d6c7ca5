"""Evidence as a person reads it, and the steps people take."""
