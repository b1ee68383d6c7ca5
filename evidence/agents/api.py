"""Node agents ask and report here: what is wanted, holds, uploads. Signed with the run's secret."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from ninja import Router
from ninja.responses import Status

from evidence.agents import asking, hold_reports, uploads
from evidence.agents.hold_reports import HoldReport
from evidence.agents.uploads import Announced
from evidence.models import AgentTask
from evidence.stores.intake import Part, intake
from evidence.stores.intake_directory import DirectoryIntake
from evidence.vault import BytesDiffer, VaultError
from runs.bodies import read_body
from runs.identity import KnownRun, verified_run
from runs.limits import SMALL_BYTES
from runs.problems import Problem
from runs.receiver import take_token

router = Router(tags=["agents"])

MAX_BODY_BYTES = 4 << 20
BUSY_RETRY_S = 2
VAULT_RETRY_S = 5

Node = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Md5 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Words = Annotated[str, msgspec.Meta(max_length=1000)]


class HeldFile(msgspec.Struct):
    """One file of a hold; an empty `sha256` is not known yet."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    bytes: Whole
    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
    inode: Annotated[int, msgspec.Meta(ge=0)] = 0
    mtime_ns: int = 0


class HoldBody(msgspec.Struct):
    """A hold, or a piece of one: `last` with the last piece."""

    id: str
    node: Node
    how: Annotated[str, msgspec.Meta(pattern="^(links|reflinks|none)$")]
    tree: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    says: Words = ""
    files: list[HeldFile] = []
    last: bool = True
    changed: list[Words] = []


class PartBody(msgspec.Struct):
    """One part: its number from 1, size and digests."""

    n: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    bytes: Whole
    sha256: Sha256
    md5: Md5


class UploadBody(msgspec.Struct):
    """What will be sent, and the parts whose URLs are wanted now."""

    node: Node
    bytes: Whole
    sha256: Sha256
    item: str = ""  # the id from `wanted`; in the path when completing
    parts: list[PartBody] = []

    def announced(self) -> Announced:
        parts = [Part(part.n, part.bytes, part.sha256, part.md5) for part in self.parts]
        return Announced(self.node, self.bytes, self.sha256, parts)


class DeclineBody(msgspec.Struct):
    """Why a node cannot do what is wanted."""

    node: Node
    why: Annotated[str, msgspec.Meta(pattern="^(not-here|outside-roots|bytes-differ|unreadable)$")]
    says: Words = ""


class ReleasedBody(msgspec.Struct):
    """A tree is gone: how many of its files, and what lies there and was not put there by a hold."""

    node: Node
    files: Whole = 0
    left: Annotated[list[Annotated[str, msgspec.Meta(max_length=4096)]], msgspec.Meta(max_length=1000)] = []


Body = TypeVar("Body", bound=msgspec.Struct)

# One slow agent must not take all threads: a part of them may be busy with a store or a part's body.
_busy = threading.BoundedSemaphore(max(1, getattr(settings, "WEB_THREADS", 4) // 2))


@contextmanager
def _store_turn() -> Iterator[None]:
    if not _busy.acquire(blocking=False):
        raise Problem(
            503,
            "busy",
            "Other agents are being answered: ask again.",
            headers={"Retry-After": str(BUSY_RETRY_S)},
        )
    try:
        yield
    except BytesDiffer as error:
        raise Problem(422, "bytes-differ", error.says, field="body") from error
    except VaultError as error:
        headers = {"Retry-After": str(VAULT_RETRY_S)}
        raise Problem(503, "vault", f"The vault does not answer: {error.says}", headers=headers) from error
    finally:
        _busy.release()


def _asked(request: HttpRequest, run: str) -> KnownRun:
    known = verified_run(request, run, None)
    take_token(known, large=False)
    return known


def _posted(request: HttpRequest, run: str, kind: type[Body]) -> tuple[KnownRun, Body]:
    raw = read_body(request, MAX_BODY_BYTES)
    known = verified_run(request, run, raw)
    take_token(known, large=len(raw) > SMALL_BYTES)
    try:
        return known, msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        says, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".") or "body"
        raise Problem(422, "invalid", f"{says}.", field=field) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Problem(400, "undecodable", "The body is no JSON.", field="body") from error


@router.get("/runs/{run}/wanted", auth=None, response=dict[str, Any])
def wanted(request: HttpRequest, run: str, node: str = "") -> dict[str, Any]:
    """Return what the agent of a node should hold, upload or remove, holds first; and when to ask again."""
    known = _asked(request, run)
    if not 1 <= len(node) <= 200 or not node.isprintable():
        raise Problem(422, "invalid", "node: the name of the node, 1 to 200 characters", field="node")
    return asking.wanted(known, node)


@router.post("/runs/{run}/holds", auth=None, response=dict[str, Any])
def holds(request: HttpRequest, run: str) -> dict[str, Any]:
    """Report what is held in a node's own file system, in one or several posts."""
    known, body = _posted(request, run, HoldBody)
    report = HoldReport(
        node=body.node,
        how=body.how,
        says=body.says,
        tree=body.tree,
        files=[msgspec.to_builtins(file) for file in body.files],
        last=body.last,
        changed=body.changed,
    )
    return hold_reports.report_hold(known, body.id, report)


@router.post("/runs/{run}/uploads", auth=None, response=dict[str, Any])
def begin(request: HttpRequest, run: str) -> dict[str, Any]:
    """Begin an upload or go on with it: which parts are there, and signed URLs for the others."""
    known, body = _posted(request, run, UploadBody)
    with _store_turn():
        task, have, urls = uploads.begin(known, body.item, body.announced())
    return {
        "id": str(task.pk),
        "part_bytes": task.part_bytes,
        "parts": [{"n": one.n, "url": one.url, "headers": dict(one.headers)} for one in urls],
        "have": sorted(have),
    }


@router.put("/runs/{run}/uploads/{upload}/parts/{n}", auth=None, response={204: None})
def part(request: HttpRequest, run: str, upload: str, n: int, token: str = "") -> HttpResponse:
    """Take one part for a directory vault; the token in the URL says which bytes may come."""
    store = intake()
    if not isinstance(store, DirectoryIntake):
        raise Problem(404, "unknown-task", "Parts go to the store itself: use the URLs that were given.")
    promised = store.read_token(token)
    if promised is None:
        raise Problem(403, "bad-token", "The token is not ours or too old: ask for new URLs.", field="token")
    task_id, name, one = promised
    task = AgentTask.objects.select_related("item", "run").filter(pk=task_id, run__slug=run).first()
    if task is None or (upload, n, name) != (str(task.pk), one.n, task.store_upload):
        raise Problem(
            403, "bad-token", "The token was made for another part: ask for new URLs.", field="token"
        )
    if task.done_at is not None or task.arrived_at is not None:
        raise Problem(409, "not-wanted", "All parts are there already.")
    length = request.META.get("CONTENT_LENGTH") or ""
    if length != str(one.bytes_total):
        # Read nothing: the announced bytes are these many, not more and not fewer.
        status = 413 if length.isdigit() and len(length) < 19 and int(length) > one.bytes_total else 422
        raise Problem(status, "wrong-size", f"Part {n} has {one.bytes_total} bytes.", field="content-length")
    with _store_turn():
        try:
            store.put(task, one, request.read)
        except UnreadablePostError as error:
            raise Problem(
                400, "body-cut", "The body ended before Content-Length bytes.", field="body"
            ) from error
    return HttpResponse(status=204)


@router.post("/runs/{run}/uploads/{upload}/complete", auth=None, response={202: dict[str, Any]})
def complete(request: HttpRequest, run: str, upload: str) -> Status[dict[str, Any]]:
    """Say that all parts are sent: size, SHA-256 and the digests of all parts, which the server checks."""
    known, body = _posted(request, run, UploadBody)
    with _store_turn():
        state = uploads.complete(known, upload, body.announced())
    return Status(202, {"id": upload, "state": state})


@router.post("/runs/{run}/wanted/{task}/decline", auth=None, response=dict[str, Any])
def decline(request: HttpRequest, run: str, task: str) -> dict[str, Any]:
    """Say that this node cannot do it, and why; the item then shows that, and others may be asked."""
    known, body = _posted(request, run, DeclineBody)
    uploads.decline(known, task, node=body.node, why=body.why, says=body.says)
    return {"id": task, "state": "declined"}


@router.post("/runs/{run}/wanted/{task}/released", auth=None, response=dict[str, Any])
def released(request: HttpRequest, run: str, task: str) -> dict[str, Any]:
    """Say that a held tree of this node is removed; the custody of its dossier then says so too."""
    known, body = _posted(request, run, ReleasedBody)
    hold_reports.report_release(known, task, node=body.node, files=body.files, left=body.left)
    return {"id": task, "state": "released"}
