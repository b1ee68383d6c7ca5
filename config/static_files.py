"""How static files are stored: named by their digest, and gzipped beside themselves once."""

from typing import Any

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
