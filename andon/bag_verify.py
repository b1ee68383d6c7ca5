"""Checks an exported evidence bag. Standard library and `cryptography` only: no network, no database.

It accepts only the bytes that Andon writes: every file is rendered again or hashed, every signature
and link is followed, a missing or extra file fails.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from andon import bag_format as form
from andon import chain, handovers
from andon.bag_trees import Tree, Unreadable
from andon.handovers import GRACE_S, Handover
from andon.wire_times import parse_time

_CHUNK_BYTES = 1 << 20
_TAG_LIMIT_BYTES = 256 << 20
_SIGNED_BY = ("key_id", "public_key", "signature")  # what signing a document adds to it


@dataclass
class Report:
    """What came of checking a bag. `key_id` signed it; `pinned`: that is the key that was asked for, or
    one that it handed over to; then `pinned_by` is the key that was asked for."""

    problems: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)  # objects of fetch.txt that are not in the bag
    deleted: list[str] = field(default_factory=list)  # of those: what two people had deleted, says the chain
    key_id: str = ""
    pinned: bool = False
    pinned_by: str = ""
    files: int = 0
    seals: int = 0
    custody_rows: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems


def verify(tree: Tree, key: str | None = None) -> Report:
    """Check a bag.

    Args:
        key: fingerprint (lower-case hex SHA-256 of the raw public key) of the key it must be signed by,
            itself or by a successor that the bag shows it handed over to.

    Raises:
        Unreadable: a file of it cannot be read, so that nothing can be said of the bag.
    """
    report = Report()
    try:
        _Check(tree, report, key).run()
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
        OverflowError,
    ) as error:
        says = (
            str(error) if type(error) is ValueError else f"is not of the form that Andon writes ({error!r})"
        )
        report.problems.append(says)
    except OSError as error:
        raise Unreadable(f"{error.filename}: {error.strerror}") from error
    return report


class _Check:
    def __init__(self, tree: Tree, report: Report, key: str | None) -> None:
        self.tree, self.report, self.key = tree, report, key
        self.names = sorted(tree.names())
        for name in self.names:
            form.check_name(name)
        self.sizes: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.handovers: list[Handover] = []
        self.elsewhere: dict[str, str] = {}  # payload files that are not in the bag → where they lie

    def run(self) -> None:
        """Check from the outside in: files, lists, signature, chain, seals."""
        self._hash_all()
        payload, fetch = self._lists()
        statement = self._statement(payload)
        keys = self._keys(statement)
        rows = self._custody(statement)
        self._not_inside(rows)
        self._seals(payload, fetch, keys, rows, statement)

    # --- files

    def _hash_all(self) -> None:
        for name in self.names:
            digest, size = hashlib.sha256(), 0
            with self.tree.open(name) as file:
                while data := file.read(_CHUNK_BYTES):
                    digest.update(data)
                    size += len(data)
            self.digests[name], self.sizes[name] = digest.hexdigest(), size
        self.report.files = len(self.names)

    def _read(self, name: str) -> bytes:
        if name not in self.digests:
            raise ValueError(f"{name}: is missing")
        if self.sizes[name] > _TAG_LIMIT_BYTES:
            raise ValueError(f"{name}: is too large for what it is")
        with self.tree.open(name) as file:
            return file.read()

    def _wrong(self, says: str) -> None:
        self.report.problems.append(says)

    # --- BagIt's own files

    def _lists(self) -> tuple[dict[str, str], dict[str, form.Fetch]]:
        if self._read("bagit.txt") != form.BAGIT:
            self._wrong("bagit.txt: is not the declaration that Andon writes")
        payload = form.read_manifest(self._read(form.MANIFEST), form.MANIFEST)
        fetch = form.read_fetch(self._read(form.FETCH), payload) if form.FETCH in self.digests else {}
        if form.FETCH in self.digests and not fetch:
            self._wrong(f"{form.FETCH}: is empty")
        for name, digest in payload.items():
            if not name.startswith(form.PAYLOAD):
                self._wrong(f"{form.MANIFEST}: {name} is no payload file")
            elif name in self.digests:
                if self.digests[name] != digest:
                    self._wrong(f"{name}: its content does not fit its digest")
                if name in fetch and self.sizes[name] != fetch[name].bytes_total:
                    self._wrong(f"{name}: has another length than {form.FETCH} says")
            elif name in fetch:
                self.elsewhere[name.removeprefix(form.PAYLOAD)] = fetch[name].url
            else:
                self._wrong(f"{name}: is missing")
        for name in self.names:
            if name.startswith(form.PAYLOAD) and name not in payload:
                self._wrong(f"{name}: is in no manifest")
        tags = {
            name: digest
            for name, digest in self.digests.items()
            if not name.startswith(form.PAYLOAD) and name != form.TAG_MANIFEST
        }
        if self._read(form.TAG_MANIFEST) != form.render_manifest(tags):
            self._wrong(f"{form.TAG_MANIFEST}: is not what the tag files give")
        info = form.read_info(self._read(form.INFO))
        sizes = [fetch[name].bytes_total if name in fetch else self.sizes.get(name, -1) for name in payload]
        if info["Payload-Oxum"] != form.oxum(sizes):
            self._wrong(f"{form.INFO}: Payload-Oxum does not fit the payload")
        self.report.facts["info"] = info
        return payload, fetch

    # --- the statement over all files

    def _statement(self, payload: Mapping[str, str]) -> dict[str, Any]:
        key_id, raw = open_envelope(self._document(form.STATEMENT), form.STATEMENT)
        self.report.key_id = key_id
        statement: dict[str, Any] = chain.parse_canonical(raw, form.STATEMENT)
        if (statement["_type"], statement["predicateType"]) != (form.STATEMENT_TYPE, form.BAG_PREDICATE):
            raise ValueError(f"{form.STATEMENT}: states something else")
        named = {row["name"]: row["digest"] for row in statement["subject"]}
        present = {
            **payload,
            **{name: digest for name, digest in self.digests.items() if name not in form.UNNAMED},
        }
        if len(named) != len(statement["subject"]):
            self._wrong(f"{form.STATEMENT}: names a file twice")
        for name in sorted(set(named) | set(present)):
            if name not in present:
                self._wrong(f"{name}: is signed and missing")
            elif name not in named:
                self._wrong(f"{name}: is not signed")
            elif named[name] != {"sha256": present[name]}:
                self._wrong(f"{name}: is not as it was signed")
        self.report.facts |= statement["predicate"]
        return statement

    def _document(self, name: str) -> Any:
        raw = self._read(name)
        if not raw.endswith(b"\n"):
            raise ValueError(f"{name}: the last line has no end")
        return chain.parse_canonical(raw[:-1], name)

    def _keys(self, statement: Mapping[str, Any]) -> set[str]:
        document = self._document(form.KEYS)
        signed = document.get("handovers", [])
        fields = {"schema", "keys", "handovers"} if signed else {"schema", "keys"}
        if set(document) != fields or document["schema"] != form.KEYS_SCHEMA:
            raise ValueError(f"{form.KEYS}: is not of the form that Andon writes")
        names = set()
        for row in document["keys"]:
            public = _exact_base64(row["public_key"], 32, form.KEYS)
            if set(row) != {"key_id", "public_key"} or row["key_id"] != hashlib.sha256(public).hexdigest():
                raise ValueError(f"{form.KEYS}: a key is not named by its fingerprint")
            names.add(row["key_id"])
        self.handovers = [_handover(one) for one in signed]
        if self.report.key_id not in names:
            self._wrong(f"{form.KEYS}: does not hold the key that signed the bag")
        self._in_use(self.report.key_id, statement["predicate"]["exported_at"], form.STATEMENT)
        self._pin()
        return names

    def _pin(self) -> None:
        if self.key is None:
            return
        if self.report.key_id in (self.key, *handovers.successors(self.handovers, self.key)):
            self.report.pinned, self.report.pinned_by = True, self.key
        else:
            says = f"signed by {self.report.key_id}, not by the key that was asked for"
            self._wrong(f"{form.STATEMENT}: {says}, which handed over to none that leads there")

    def _in_use(self, key_id: str, at: str, where: str) -> None:
        """Find fault with what says that it was signed after its key was handed over or given up."""
        for one in self.handovers:
            if one.old == key_id and parse_time(at)[0] > one.at_ns + GRACE_S * 10**9:
                self._wrong(f"{where}: is signed by a key that was no longer in use at {at}")

    # --- custody and seals

    def _custody(self, statement: Mapping[str, Any]) -> list[dict[str, Any]]:
        raw = self._read(form.CUSTODY)
        if not raw.endswith(b"\n"):
            raise ValueError(f"{form.CUSTODY}: the last line has no end")
        rows = [chain.parse_canonical(line, form.CUSTODY) for line in raw.split(b"\n")[:-1]]
        predicate = statement["predicate"]
        self.report.problems += chain.verify_rows(rows, predicate["dossier"])
        self.report.custody_rows = len(rows)
        if predicate["custody"] != {"seq": rows[-1]["seq"], "digest": rows[-1]["digest"]}:
            self._wrong(f"{form.CUSTODY}: does not end where the signed statement says")
        return rows

    def _not_inside(self, rows: Sequence[Mapping[str, Any]]) -> None:
        deletions = [row["data"].get("names", []) for row in rows if row["what"] == "objects deleted"]
        deleted = {name for names in deletions for name in names}
        self.report.deleted = sorted(deleted & set(self.elsewhere))
        self.report.not_checked = [
            f"{path} ({url})" for path, url in self.elsewhere.items() if path not in deleted
        ]

    def _seals(
        self,
        payload: Mapping[str, str],
        fetch: Mapping[str, form.Fetch],
        keys: set[str],
        rows: Sequence[Mapping[str, Any]],
        statement: Mapping[str, Any],
    ) -> None:
        names = [name for name in self.names if name.startswith(form.SEALS)]
        objects: dict[str, dict[str, Any]] = {}
        named = {row["data"].get("seal"): row["object_sha256"] for row in rows if row["what"] == "seal"}
        previous, items = "", []
        for number, name in enumerate(names, start=1):
            if name != f"{form.SEALS}{number:04d}.json":
                raise ValueError(f"{name}: a seal is missing or has another name")
            key_id, raw = open_envelope(self._document(name), name)
            seal = chain.parse_canonical(raw, name)
            predicate = seal["predicate"]
            if key_id not in keys:
                self._wrong(f"{name}: is signed by a key that the bag does not vouch for")
            self._in_use(key_id, predicate["made_at"], name)
            if (seal["_type"], seal["predicateType"]) != (form.STATEMENT_TYPE, form.SEAL_PREDICATE):
                raise ValueError(f"{name}: states something else")
            if predicate["number"] != number or predicate["previous"] != previous:
                self._wrong(f"{name}: does not name the seal before it")
            if predicate["dossier"] != statement["predicate"]["dossier"]:
                self._wrong(f"{name}: belongs to another dossier")
            previous = hashlib.sha256(raw).hexdigest()
            if named.get(number) != previous:
                self._wrong(f"{name}: the custody chain does not name it")
            head = predicate["custody"]
            if head is not None and rows[head["seq"] - 1]["digest"] != head["digest"]:
                self._wrong(f"{name}: the custody chain has changed since it was made")
            if {one["name"]: one["sha256"] for one in predicate["objects"]} != {
                one["name"]: one["digest"]["sha256"] for one in seal["subject"]
            }:
                self._wrong(f"{name}: its objects are not those it signs")
            objects |= {one["name"]: one for one in predicate["objects"]}
            items = predicate["items"]
        if len(named) != len(names):
            self._wrong("the custody chain names seals that are not in the bag")
        self.report.seals = len(names)
        if previous != statement["predicate"]["seal"]:
            self._wrong("the last seal is not the one that the signed statement names")
        self._objects(payload, fetch, objects)
        self._items(items, objects)

    def _objects(
        self,
        payload: Mapping[str, str],
        fetch: Mapping[str, form.Fetch],
        objects: Mapping[str, Mapping[str, Any]],
    ) -> None:
        for path, one in objects.items():
            name = form.PAYLOAD + path
            if payload.get(name) != one["sha256"]:
                self._wrong(f"{path}: is sealed and not in the bag as it was sealed")
            size = fetch[name].bytes_total if name in fetch else self.sizes.get(name)
            if size != one["bytes"]:
                self._wrong(f"{path}: has another length than was sealed")
        for name in payload:
            path = name.removeprefix(form.PAYLOAD)
            if path.startswith("items/") and path not in objects:
                self._wrong(f"{path}: is in no seal")

    def _items(self, items: Sequence[Mapping[str, Any]], objects: Mapping[str, Mapping[str, Any]]) -> None:
        for item in items:
            if item["state"] != "sealed":
                continue
            start = f"{item['directory']}/"
            table = [
                {"path": path.removeprefix(start), "bytes": one["bytes"], "sha256": one["sha256"]}
                for path, one in objects.items()
                if path.startswith(start)
            ]
            if chain.file_table_digest(table) != item["digest"]:
                self._wrong(f"{item['name']}: its objects do not give its digest")


def open_envelope(envelope: Any, where: str) -> tuple[str, bytes]:
    """Return key id and payload of a DSSE envelope with exactly one signature.

    Raises:
        ValueError: another form, or the signature does not fit.
    """
    if set(envelope) != {"payloadType", "payload", "signatures"} or len(envelope["signatures"]) != 1:
        raise ValueError(f"{where}: is not an envelope with one signature")
    kind, row = envelope["payloadType"], envelope["signatures"][0]
    if kind != form.PAYLOAD_TYPE or set(row) != {"keyid", "sig", "public_key"}:
        raise ValueError(f"{where}: is not an envelope of the form that Andon writes")
    payload = _exact_base64(envelope["payload"], None, where)
    public = _exact_base64(row["public_key"], 32, where)
    signature = _exact_base64(row["sig"], 64, where)
    key_id = hashlib.sha256(public).hexdigest()
    if row["keyid"] != key_id:
        raise ValueError(f"{where}: the key is not named by its fingerprint")
    type_bytes = kind.encode()
    message = b"DSSEv1 %d %s %d %s" % (len(type_bytes), type_bytes, len(payload), payload)
    _check_signature(public, signature, message, where)
    return key_id, payload


def _handover(signed: Any) -> Handover:
    if not isinstance(signed, list) or not 1 <= len(signed) <= 2:
        raise ValueError(f"{form.KEYS}: a handover is signed by the keys it names")
    try:
        return handovers.read(signed, _content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{form.KEYS}: a handover {error}") from error


def _content(document: Any) -> Mapping[str, Any]:
    """Return the content of a signed document (see `andon.signing.sign_document`), once it was checked."""
    public = _exact_base64(document["public_key"], 32, form.KEYS)
    signature = _exact_base64(document["signature"], 64, form.KEYS)
    if document["key_id"] != hashlib.sha256(public).hexdigest():
        raise ValueError("is signed by a key that is not named by its fingerprint")
    message = chain.canonical({name: one for name, one in document.items() if name != "signature"})
    _check_signature(public, signature, message, "a handover")
    return {name: one for name, one in document.items() if name not in _SIGNED_BY}


def _check_signature(public: bytes, signature: bytes, message: bytes, where: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature as error:
        raise ValueError(f"{where}: its signature does not fit") from error


def _exact_base64(text: Any, length: int | None, where: str) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{where}: base64 text is needed")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: is not base64") from error
    if base64.b64encode(raw).decode("ascii") != text or (length is not None and len(raw) != length):
        raise ValueError(f"{where}: is not canonical base64 of the right length")
    return raw
