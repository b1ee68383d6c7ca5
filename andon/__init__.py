"""Andon's domain library: everything that needs no database and can run beside a trainer."""

__version__ = "0.1.0"
