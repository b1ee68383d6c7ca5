"""The one line by which others ask that people be told: a unit of work, in the caller's transaction."""

from runs.work import enqueue

KIND = "incidents.page"
# Timeline entries after which what people must know may be another; everything else pages nobody.
TELLING = frozenset(
    {"opened", "state", "acknowledged", "launch", "directive", "request", "approval", "reject", "standing"}
)


def ask(incident_id: int) -> None:
    """Look again whom this incident must wake, once this transaction has committed."""
    enqueue(kind=KIND, key=f"incident-{incident_id}", payload={"incident": incident_id})


def ask_page(key: str) -> None:
    """Look again whom this page must reach, once this transaction has committed."""
    enqueue(kind=KIND, key=key, payload={"page": key})
