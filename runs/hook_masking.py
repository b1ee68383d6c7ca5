"""Keeps hook tokens that stand in an address out of every log line.

No import of Django: the logging of a process is set up before its apps are.
"""

import logging
import re

_TOKEN = re.compile(r"(/api/v1/hooks/[^/\s?#\"']+/)[^/\s?#\"']+")


def mask(text: str) -> str:
    """Return `text` with the token of any hook address replaced."""
    return _TOKEN.sub(r"\1[masked]", text)


class MaskHookTokens(logging.Filter):
    """Log filter of the console handler: every record passes, none with a token."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask message and traceback."""
        said = record.getMessage()
        if "/hooks/" in said:
            record.msg, record.args = mask(said), ()
        if record.exc_info and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = mask(text) if "/hooks/" in text else None
        return True
