"""What a page says: its words, and whether what an outsider named stays text in it."""

import re

from django.http import HttpResponse

HOSTILE = '<script>alert(1)</script>\u202e"><img src=x onerror=alert(2)>' + "A" * 10_000


def text_of(response: HttpResponse) -> str:
    """Return a page's words: no tags, folded blanks."""
    html = re.sub(
        r"<(script|style|template|title)\b.*?</\1>", " ", response.content.decode(), flags=re.DOTALL
    )
    plain = re.sub(r"<[^>]+>", " ", html).replace("&#x27;", "'").replace("&amp;", "&")
    return re.sub(r"\s+", " ", plain)


def is_inert(html: str, address: str) -> None:
    """Assert that what somebody named ends as text: no markup, no reordering, no flood."""
    # What a person edits stands as they wrote it, in a box it cannot leave.
    shown = re.sub(r"<textarea.*?</textarea>", "", html, flags=re.DOTALL)
    for text, bad in ((html, "<script>alert"), (html, "<img src=x"), (shown, "\u202e"), (shown, "A" * 5_000)):
        at = text.find(bad)
        assert at < 0, f"{address}: {text[max(0, at - 200) : at + 60]!r}"
