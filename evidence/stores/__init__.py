"""The stores behind `evidence.vault`, what each truly enforces, and what is on its way there."""
