"""Opens incidents from findings."""
