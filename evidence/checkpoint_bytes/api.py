"""A vault officer's tools read checkpoint bytes here. No browser can: a page has no such token to send."""

import base64
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Router, Schema

from evidence.checkpoint_bytes import allowing, giving
from evidence.collecting import samples
from evidence.models import Item, StoredObject
from evidence.pages.downloads import file_name
from evidence.queries import visible_dossiers
from evidence.refused import Refused
from evidence.sources import SourceError
from evidence.vault import VaultError
from runs.access import PersonalToken
from runs.models import Person
from runs.problems import Problem
from runs.proof import NotAgain, prove_by_words

router = Router(tags=["evidence"])
_ITEM = "/dossiers/{dossier_id}/items/{item_id}"


class File(Schema):
    """One file of an item; `sha256` is empty while nobody knows it."""

    path: str
    bytes: int | None
    sha256: str


class Files(Schema):
    """An item's files, and what reading their bytes takes."""

    item: str
    state: str
    files: list[File]
    two_people: bool
    may_read_until: str | None = None  # where two people agreed to this person's reading
    why_not: str = ""


class Reading(Schema):
    """Why, and the password or a code: a token alone may leak.

    `path` is one file, from offset `start`; left out, the answer is a tar archive of all.
    """

    why: str = ""
    path: str = ""
    start: int = 0
    password: str = ""
    code: str = ""


@router.get(f"{_ITEM}/files", auth=PersonalToken(), response=Files)
def files(request: HttpRequest, dossier_id: int, item_id: int) -> dict[str, Any]:
    """Return an item's files as they are stored, or as they are known of its source."""
    person, item = _asked(request, dossier_id, item_id)
    reason = allowing.why_not(item)
    grant = allowing.grant_of(item, person)
    stored = StoredObject.objects.filter(item=item, deleted_at=None).order_by("path")
    rows = [{"path": one.path, "bytes": one.bytes_total, "sha256": one.sha256} for one in stored] or [
        {"path": entry["path"], "bytes": entry.get("bytes"), "sha256": entry.get("sha256") or ""}
        for entry in item.files
    ]
    return {
        "item": item.name,
        "state": str(item.state),
        "files": rows,
        "two_people": allowing.needs_two(item),
        "may_read_until": allowing.until(grant).isoformat() if grant else None,
        "why_not": reason[1] if reason else "",
    }


@router.post(f"{_ITEM}/read", auth=PersonalToken(), response=None)
def read(request: HttpRequest, dossier_id: int, item_id: int, given: Reading) -> HttpResponseBase:
    """Give a vault officer the bytes of a checkpoint, or the plain bytes of one file of raw samples.

    Each answer is a row of custody, and people are told. `Repr-Digest` (RFC 9530) is of the whole file.
    """
    person, item = _asked(request, dossier_id, item_id)
    try:
        prove_by_words(request, person, password=given.password, code=given.code)
        if item.kind == "raw_samples":
            return _samples(item, person, given)
        if given.path:
            out = giving.give_file(
                item=item, person=person, why=given.why, path=given.path, start=given.start
            )
        else:
            out = giving.give_all(item=item, person=person, why=given.why)
    except NotAgain as refused:
        raise Problem(refused.status, "password", refused.says, field="password") from refused
    except Refused as refused:
        raise Problem(refused.status, refused.code, refused.says) from refused
    except (SourceError, VaultError) as error:
        raise Problem(503, "not-given", f"It is not given now: {error.says}.") from error
    answer = _stream(out.name, out.data)
    answer["Content-Length"] = str(out.bytes_total)
    if out.sha256:
        answer["Repr-Digest"] = f"sha-256=:{base64.b64encode(bytes.fromhex(out.sha256)).decode()}:"
    return answer


def _samples(item: Item, person: Person, given: Reading) -> HttpResponseBase:
    one = StoredObject.objects.filter(item=item, path=given.path, deleted_at=None).first()
    if one is None:
        raise Refused("no-such-file", f"{item.name} has no file {given.path!r}: name one.")
    data = samples.read_samples(one=one, person=person, why=given.why)
    return _stream(given.path.removesuffix(".encrypted"), data)


def _stream(name: str, data: Any) -> StreamingHttpResponse:
    answer = StreamingHttpResponse(data, content_type="application/octet-stream")
    answer["Content-Disposition"] = content_disposition_header(True, file_name(name)) or "attachment"
    answer["Cache-Control"] = "private, no-store"
    return answer


def _asked(request: HttpRequest, dossier_id: int, item_id: int) -> tuple[Person, Item]:
    person = request.user
    assert isinstance(person, Person)
    rows = Item.objects.select_related("dossier__run__project")
    item = rows.filter(pk=item_id, dossier=dossier_id, dossier__in=visible_dossiers(person)).first()
    if item is None:
        raise Problem(
            404, "unknown-item", "There is no such item of a dossier that you may see.", field="item"
        )
    return person, item
