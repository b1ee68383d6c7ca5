"""A postmortem in each of its forms, with the names of people or without."""

import logging
from typing import Any

from andon.postmortem import html, markdown
from andon.postmortem.document import Document, encode

# It tells of every step, and of every property that only a screen needs.
logging.getLogger("weasyprint").setLevel(logging.ERROR)

TYPES = {
    "md": "text/markdown; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "pdf": "application/pdf",
    "json": "application/json",
}


def render(document: Document, form: str) -> bytes:
    """Return a document as "md", "html", "pdf" or "json".

    Markdown, HTML and JSON are the same bytes for the same document; a PDF carries the moment it was made.
    """
    match form:
        case "md":
            return markdown.render(document).encode()
        case "html":
            return html.render(document).encode()
        case "pdf":
            return pdf(document)
        case _:
            return encode(document)


def pdf(document: Document) -> bytes:
    """Return the printed form, on A4."""
    # Half a second of imports that no other page needs.
    from weasyprint import HTML  # type: ignore[import-untyped]

    made: bytes = HTML(string=html.render(document), url_fetcher=_nothing).write_pdf()
    return made


def _nothing(url: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Refuse every address: a postmortem loads nothing, and what a trainer wrote must not make it."""
    raise ValueError(f"a postmortem loads nothing: {url[:80]}")
