"""The agent of a node: holds evidence where it lies, masks it, and uploads it to the vault.

`andon agent` runs one per node and run, beside the trainer and not inside it. It asks the server what is
wanted, serves only paths under its own roots, and can be killed at any moment: what it did is found again.
"""
