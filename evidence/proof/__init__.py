"""What lets a stranger check the vault: seals, bags, and reading everything again."""
