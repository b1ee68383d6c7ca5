"""Who may see and do what, for every address of the server: the one place where it is written down.

A page or an API call without a line here fails `test_url_map.py`. Say who may *see* it (GET) and who may *do*
it (POST): `None` where the method does not exist. What nobody may see is 404 for a stranger, whether or not
it exists; what a member's roles do not allow is 403.
"""

from dataclasses import dataclass
from enum import Enum

from runs.models import Role


class To(Enum):
    """Who, where roles do not decide."""

    ANYONE = "anyone, signed in or not"
    SIGNED_IN = "any person; what they see is their own"
    MEMBERS = "members of the project, whatever their roles; others get 404"
    KEY_HOLDERS = "who holds the secret in the address or in the headers; others get 401 or 404"


Who = To | frozenset[Role] | None

ALL = To.ANYONE
SIGNED_IN = To.SIGNED_IN
MEMBERS = To.MEMBERS
KEY = To.KEY_HOLDERS
RESPONDERS = frozenset({Role.RESPONDER, Role.APPROVER, Role.ADMIN})
APPROVERS = frozenset({Role.APPROVER})
ADMINS = frozenset({Role.ADMIN})
VAULT_ASKERS = frozenset({Role.RESPONDER, Role.APPROVER, Role.VAULT_OFFICER, Role.ADMIN})
VAULT_OFFICERS = frozenset({Role.VAULT_OFFICER})
VAULT_KEEPERS = frozenset({Role.APPROVER, Role.VAULT_OFFICER, Role.ADMIN})


@dataclass(frozen=True, slots=True)
class Access:
    """Who may see an address, who may do what its forms do, and what a form needs to get as far as that."""

    see: Who
    do: Who = None
    fields: tuple[tuple[str, str], ...] = ()  # `{name}` stands for what the walk puts into addresses
    name: str = ""  # what stands for `<slug:name>` of this address


def _do(who: Who, **fields: str) -> Access:
    return Access(None, who, tuple(fields.items()))


def _both(see: Who, do: Who, **fields: str) -> Access:
    return Access(see, do, tuple(fields.items()))


_INCIDENT = "incidents/<int:incident_id>"
_DOSSIER = "vault/<int:dossier_id>"

PAGES: dict[str, Access] = {
    # Before a session
    "": Access(ALL, ALL),
    "sign-in": _both(ALL, ALL),
    "sign-in/challenge": _do(ALL),
    "sign-in/passkey": _do(ALL),
    "sign-in/second-step": _both(ALL, ALL),
    "sign-in/lost": _both(ALL, ALL, email="nobody@example.org"),
    "sign-in/lost/<str:key>": _both(KEY, KEY),
    "sign-in/cancelled": Access(ALL),
    "sign-in/<slug:provider_id>/go": _do(KEY),  # 404 as long as no provider is configured
    "sign-in/<slug:provider_id>/callback": Access(KEY),
    "sign-out": _do(ALL),
    "invitations/<str:token>": _both(KEY, KEY),
    "acknowledge/<str:token>": _both(KEY, KEY),
    ".well-known/andon-keys.json": Access(ALL, ALL),
    # One's own account
    "account": Access(SIGNED_IN),
    "account/prove": _both(SIGNED_IN, SIGNED_IN),
    "account/challenge": _do(SIGNED_IN),
    "account/password": _both(SIGNED_IN, SIGNED_IN),
    "account/mail": _both(SIGNED_IN, SIGNED_IN, email="nobody@example.org"),
    "account/mail/<str:key>": _both(KEY, KEY),
    "account/sessions": _both(SIGNED_IN, SIGNED_IN),
    "account/passkeys/add": _both(SIGNED_IN, SIGNED_IN),
    "account/passkeys/options": _do(SIGNED_IN),
    "account/passkeys/<int:passkey_id>": _both(KEY, KEY),  # one's own only
    "account/codes": _both(SIGNED_IN, SIGNED_IN),
    "account/recovery-codes": _both(KEY, KEY),  # none until there is something to recover
    "account/sso/unlink": _do(SIGNED_IN),
    "account/tokens": _both(SIGNED_IN, SIGNED_IN),
    "theme": _do(SIGNED_IN),
    # A project's accounts
    "projects/<slug:project>/people": _both(MEMBERS, ADMINS),
    "projects/<slug:project>/hooks": _both(ADMINS, ADMINS),
    "projects/<slug:project>/secrets": Access(ADMINS),
    "projects/<slug:project>/log": Access(ADMINS),
    # Runs
    "runs": Access(SIGNED_IN),
    "fragments/runs": Access(SIGNED_IN),
    "runs/<slug:slug>": Access(MEMBERS),
    "runs/<slug:slug>/head": Access(MEMBERS),
    "runs/<slug:slug>/figure.json": Access(MEMBERS),
    "runs/<slug:slug>/ledger": Access(MEMBERS),
    **{f"runs/<slug:slug>/ledger.{form}": Access(MEMBERS) for form in ("csv", "json", "parquet")},
    "runs/<slug:slug>/seen": Access(MEMBERS),
    "runs/<slug:slug>/lineage": Access(MEMBERS),
    "runs/<slug:slug>/goodput": Access(MEMBERS),
    "runs/<slug:slug>/hold": _do(RESPONDERS),
    "runs/<slug:slug>/secrets": _both(ADMINS, ADMINS),
    # Lists that show a person what is theirs
    "incidents": Access(SIGNED_IN),
    "ledger": Access(SIGNED_IN),
    "goodput": Access(SIGNED_IN),
    "nodes": Access(SIGNED_IN),
    "fragments/nodes": Access(SIGNED_IN),
    "nodes/<path:node>": Access(MEMBERS),
    # What may hold a run, and what may let it go on by itself
    "rules": Access(SIGNED_IN),
    "rules/<slug:rule>": Access(SIGNED_IN),
    "rules/<slug:rule>/<slug:slug>": Access(MEMBERS),
    "rules/<slug:rule>/<slug:slug>/mode": _do(APPROVERS | ADMINS, mode="off"),
    "rules/<slug:rule>/<slug:slug>/judge": _do(RESPONDERS, finding="{finding_id}", verdict="right"),
    "standing": Access(SIGNED_IN),
    "standing/new": _do(RESPONDERS, project="default"),
    "standing/<int:standing_id>": Access(MEMBERS),
    "standing/<int:standing_id>/sign": _do(APPROVERS),
    "standing/<int:standing_id>/revoke": _do(RESPONDERS),
    "search": Access(SIGNED_IN),
    "system": Access(SIGNED_IN),
    "system/probe.json": Access(SIGNED_IN),
    "system/parts": Access(SIGNED_IN),
    "on-call": Access(SIGNED_IN),
    "on-call/take": _do(RESPONDERS, project="default", to="bob", hours="8"),
    "on-call/pages/<int:page_id>/acknowledge": _do(RESPONDERS),
    # One incident
    _INCIDENT: Access(MEMBERS),
    f"{_INCIDENT}/parts/<slug:name>": Access(MEMBERS),
    f"{_INCIDENT}/grid.png": Access(MEMBERS),
    f"{_INCIDENT}/layers.png": Access(MEMBERS),
    f"{_INCIDENT}/figure.json": Access(MEMBERS),
    f"{_INCIDENT}/cells.json": Access(MEMBERS),
    f"{_INCIDENT}/cell.json": Access(MEMBERS),
    f"{_INCIDENT}/raw/<slug:name>": Access(MEMBERS, name="log"),
    f"{_INCIDENT}/status": _both(MEMBERS, RESPONDERS),
    f"{_INCIDENT}/status.txt": Access(MEMBERS),
    f"{_INCIDENT}/acknowledge": _do(RESPONDERS),
    f"{_INCIDENT}/plan": _do(RESPONDERS),
    f"{_INCIDENT}/request": _do(RESPONDERS),
    f"{_INCIDENT}/approve": _both(MEMBERS, APPROVERS),
    f"{_INCIDENT}/reject": _do(APPROVERS),
    f"{_INCIDENT}/withdraw": _do(frozenset()),  # only who asked
    f"{_INCIDENT}/false-alarm": _do(APPROVERS),
    f"{_INCIDENT}/solo": _do(APPROVERS),
    f"{_INCIDENT}/break-glass": _do(ADMINS),
    f"{_INCIDENT}/waive": _do(RESPONDERS, item="{item_id}"),
    f"{_INCIDENT}/resolve": _do(RESPONDERS),
    f"{_INCIDENT}/notes": _do(MEMBERS, text="seen before"),
    f"{_INCIDENT}/notes/preview": _do(MEMBERS),
    f"{_INCIDENT}/images": _do(MEMBERS),
    f"{_INCIDENT}/images/<str:sha256>": Access(KEY),
    f"{_INCIDENT}/duties": _do(RESPONDERS),
    f"{_INCIDENT}/hand-over": _both(MEMBERS, RESPONDERS),
    f"{_INCIDENT}/page": _both(MEMBERS, RESPONDERS),
    f"{_INCIDENT}/diagnosis/take": _do(RESPONDERS, family="data"),
    f"{_INCIDENT}/diagnosis/release": _do(RESPONDERS, family="data"),
    f"{_INCIDENT}/diagnosis/start": _do(RESPONDERS, family="data", probe="own", name="x", condition="y"),
    f"{_INCIDENT}/diagnosis/stop": _do(RESPONDERS, number="1"),
    f"{_INCIDENT}/diagnosis/result": _do(RESPONDERS, number="1", result="x"),
    f"{_INCIDENT}/diagnosis/cause": _do(RESPONDERS, certainty="unknown"),
    f"{_INCIDENT}/postmortem": Access(MEMBERS),
    f"{_INCIDENT}/postmortem/edit": _both(MEMBERS, RESPONDERS, part="summary", text="x", base="0"),
    f"{_INCIDENT}/postmortem/final": _do(RESPONDERS),
    f"{_INCIDENT}/postmortem/reopen": _do(RESPONDERS),
    f"{_INCIDENT}/postmortem/review": _do(RESPONDERS),
    **{f"{_INCIDENT}/postmortem.{form}": Access(MEMBERS) for form in ("md", "html", "pdf", "json")},
    # The vault
    "vault": Access(SIGNED_IN),
    "vault/open": _both(SIGNED_IN, RESPONDERS, run="gpt-16"),
    "vault/objects/<str:sha256>": Access(MEMBERS),
    _DOSSIER: Access(MEMBERS),
    f"{_DOSSIER}/items": Access(MEMBERS),
    f"{_DOSSIER}/items/<int:item_id>": Access(MEMBERS),
    f"{_DOSSIER}/items/<int:item_id>/read": _both(MEMBERS, VAULT_OFFICERS, turn="ask"),
    f"{_DOSSIER}/custody": Access(MEMBERS),
    f"{_DOSSIER}/bag": _do(VAULT_ASKERS),
    f"{_DOSSIER}/objects/<int:object_id>": _do(VAULT_ASKERS),
    f"{_DOSSIER}/close": _both(MEMBERS, VAULT_ASKERS),
    f"{_DOSSIER}/extend": _both(MEMBERS, VAULT_KEEPERS, until="2099-01-01"),
    **{
        f"{_DOSSIER}/{name}": _both(MEMBERS, VAULT_ASKERS, turn="ask")
        for name in ("release", "deletion", "compliance", "erasure")
    },
}

# Calls of /api/v1 by (method, path as the documentation shows it). People's tools come with a personal token.
API: dict[tuple[str, str], Who] = {
    ("POST", "/runs/{run}/events"): KEY,
    ("POST", "/runs/{run}/frames"): KEY,
    ("GET", "/runs/{run}/directive"): KEY,
    ("POST", "/runs/{run}/resume"): KEY,
    ("POST", "/runs/{run}/deletions"): KEY,
    ("GET", "/runs/{run}/wanted"): KEY,
    ("GET", "/runs/{run}/volatile"): KEY,
    ("POST", "/runs/{run}/holds"): KEY,
    ("POST", "/runs/{run}/uploads"): KEY,
    ("PUT", "/runs/{run}/uploads/{upload}/parts/{n}"): KEY,
    ("POST", "/runs/{run}/uploads/{upload}/complete"): KEY,
    ("POST", "/runs/{run}/wanted/{task}/decline"): KEY,
    ("POST", "/runs/{run}/wanted/{task}/released"): KEY,
    ("POST", "/hooks/{source}"): KEY,
    ("POST", "/hooks/{source}/{token}"): KEY,
    ("GET", "/runs"): SIGNED_IN,
    ("GET", "/incidents"): SIGNED_IN,
    ("GET", "/runs/{run}"): MEMBERS,
    ("GET", "/runs/{run}/findings"): MEMBERS,
    ("GET", "/runs/{run}/ledger"): MEMBERS,
    ("GET", "/runs/{run}/ledger/export"): MEMBERS,
    ("GET", "/runs/{run}/seen"): MEMBERS,
    ("GET", "/runs/{run}/goodput"): MEMBERS,
    ("GET", "/incidents/{incident_id}"): MEMBERS,
    ("GET", "/dossiers/{dossier_id}/items/{item_id}/files"): MEMBERS,
    ("POST", "/dossiers/{dossier_id}/items/{item_id}/read"): VAULT_OFFICERS,
    ("POST", "/incidents/{incident_id}/request"): RESPONDERS,
    ("POST", "/incidents/{incident_id}/approve"): APPROVERS,
    ("POST", "/incidents/{incident_id}/reject"): APPROVERS,
    ("POST", "/incidents/{incident_id}/withdraw"): frozenset(),  # only who asked
    ("POST", "/incidents/{incident_id}/false-alarm"): APPROVERS,
    ("POST", "/incidents/{incident_id}/solo"): APPROVERS,
    ("POST", "/incidents/{incident_id}/break-glass"): ADMINS,
    ("GET", "/standing-approvals"): SIGNED_IN,
    ("POST", "/standing-approvals"): RESPONDERS,
    ("POST", "/standing-approvals/{standing_id}/sign"): APPROVERS,
    ("POST", "/standing-approvals/{standing_id}/revoke"): RESPONDERS,
}
# Beside them: the documentation, open without sign-in.
API_OPEN = {"api/v1/openapi.json", "api/v1/docs"}
