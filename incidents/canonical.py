"""Canonical bytes and digests of what people sign: see `andon.canonical`."""

from andon.canonical import canonical_bytes, exact, sha256

__all__ = ["canonical_bytes", "exact", "sha256"]
