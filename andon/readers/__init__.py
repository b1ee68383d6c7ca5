"""Foreign formats, one file each: what other tools write, as plain data."""
