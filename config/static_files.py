"""How static files are stored: named by their digest, and gzipped beside themselves once."""

import hashlib
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from whitenoise.compress import Compressor
from whitenoise.storage import CompressedManifestStaticFilesStorage


class Storage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # it has no types
    """WhiteNoise's, without Brotli, which comes with the PDF writer.

    Brotli takes most of a minute for Plotly's script, at every first start, to save a fifth of what gzip
    leaves, once for each browser.
    """

    def create_compressor(self, **options: Any) -> Compressor:
        """Return a compressor that only gzips."""
        return Compressor(use_brotli=False, **options)


def are_collected() -> bool:
    """Whether STATIC_ROOT was made from just the files that are there now; to make it takes seconds."""
    try:
        return _stamp().read_text("utf-8") == _fingerprint()
    except OSError:
        return False


def say_collected() -> None:
    """Remember what STATIC_ROOT was made from."""
    _stamp().write_text(_fingerprint(), "utf-8")


def _stamp() -> Path:
    return Path(settings.STATIC_ROOT) / ".made-from"


def _fingerprint() -> str:
    """Return a digest over name, size and time of every file that `collectstatic` takes."""
    found = []
    for finder in get_finders():
        for name, storage in finder.list([]):
            seen = Path(storage.path(name)).stat()
            found.append(f"{name} {seen.st_size} {seen.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
