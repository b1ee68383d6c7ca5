"""Holds where the source lies: put on, noted, taken off."""
