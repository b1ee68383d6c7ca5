"""Training logs: one file per trainer's way of printing a step, and what puts their lines together."""
