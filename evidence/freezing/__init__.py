"""What a freeze plan names, and how it follows what becomes known afterwards."""
