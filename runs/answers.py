"""The answer to a post, with the directive in force spliced in as the signed text it was stored as."""

from collections.abc import Sequence

import msgspec
from django.http import HttpResponse

from andon.wire import Refusal
from runs.wanted import wanted_of


def counts(accepted: int, refused: Sequence[Refusal]) -> dict[str, object]:
    """Return the part of an answer that a repeat of the post gets again."""
    return {
        "accepted": accepted,
        "refused": [{"index": r.index, "field": r.field, "detail": r.detail} for r in refused],
    }


def accepted(
    run_id: int, first: dict[str, object], directive: str | None, *, duplicate: bool
) -> HttpResponse:
    """Return 202 with the first counts, how much is wanted of the run's nodes, and the current directive.

    Args:
        directive: JSON text, None: the run has none.
    """
    head = msgspec.json.encode(first | {"duplicate": duplicate, "wanted": wanted_of(run_id)})[:-1]
    body = b'%s,"directive":%s}' % (head, (directive or "null").encode())
    return HttpResponse(body, content_type="application/json", status=202)
