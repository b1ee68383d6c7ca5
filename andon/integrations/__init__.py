"""Andon in trainers that own their loop: one file per trainer, imported only by who uses it."""
