"""Postmortems: what a reader who was not there can follow and check, as Markdown, HTML and JSON."""
