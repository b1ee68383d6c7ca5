"""Machines ask here: the deletion gate; beside it what agents and a vault officer's tools call."""

import json
from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema
from ninja.types import DictStrAny

from evidence import queries
from evidence.agents import api
from evidence.checkpoint_bytes import api as checkpoint_bytes
from evidence.gates import may_delete
from runs.access import signed_run
from runs.problems import Problem

router = Router(tags=["evidence"])
router.add_router("", api.router)
router.add_router("", checkpoint_bytes.router)

MAX_BODY_BYTES = 4 << 20
MAX_URIS = 10_000


class DeletionAnswer(Schema):
    """One answer: `until` is when an allow expires, `dossier` which dossier holds the object."""

    uri: str
    allow: bool
    until: str | None = None
    dossier: str | None = None
    reason: str


class DeletionAnswers(Schema):
    """The answers, in the order asked."""

    items: list[DeletionAnswer]


_BODY: DictStrAny = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["uris"],
                    "properties": {
                        "uris": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_URIS}
                    },
                }
            }
        },
    }
}


class VolatileItem(Schema):
    """A thing that vanishes with the processes or the node, and is not safe yet; `says` why."""

    kind: str
    name: str
    state: str
    says: str


class VolatileItems(Schema):
    """What whoever must kill waits for."""

    items: list[VolatileItem]


@router.get("/runs/{run}/volatile", response=VolatileItems, auth=None)
def volatile(request: HttpRequest, run: str) -> dict[str, Any]:
    """Return what of a run's open evidence vanishes with its processes and nodes and is not safe yet.

    A supervisor that must kill waits for it, 60 s at most; signed by the run.
    """
    return {"items": queries.volatile_items(signed_run(request, run, None))}


@router.post("/runs/{run}/deletions", response=DeletionAnswers, auth=None, openapi_extra=_BODY)
def deletions(request: HttpRequest, run: str) -> dict[str, Any]:
    """Answer whether a run's checkpoint manager may delete these objects.

    An allow holds for 10 minutes. Without an answer nothing may be deleted.
    """
    length = request.META.get("CONTENT_LENGTH") or ""
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise Problem(413, "too-large", f"the body may have {MAX_BODY_BYTES} bytes: ask in several posts")
    body = request.read(MAX_BODY_BYTES + 1)
    if len(body) > MAX_BODY_BYTES:
        raise Problem(413, "too-large", f"the body may have {MAX_BODY_BYTES} bytes: ask in several posts")
    asking = signed_run(request, run, body)
    return {"items": may_delete(run=asking, uris=_uris(body))}


def _uris(body: bytes) -> list[str]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "undecodable", "the body is no JSON") from error
    uris = document.get("uris") if isinstance(document, dict) else None
    if not isinstance(uris, list):
        raise Problem(422, "invalid", 'expected {"uris": ["…"]}', field="uris")
    if len(uris) > MAX_URIS:
        raise Problem(422, "invalid", f"at most {MAX_URIS} at once", field="uris")
    for index, uri in enumerate(uris):
        if not isinstance(uri, str):
            raise Problem(422, "invalid", "must be text", field=f"uris[{index}]")
    return list(dict.fromkeys(_clean(uri) for uri in uris))


def _clean(uri: str) -> str:
    # What cannot be stored or sent back is refused by the gate as a URI, not by an error.
    return "".join(
        "\ufffd" if character == "\0" or "\ud800" <= character <= "\udfff" else character for character in uri
    )
