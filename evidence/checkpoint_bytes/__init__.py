"""Who may read the bytes of a checkpoint in the vault, and how they leave: never by a browser."""
