"""Object Lock as one bucket really has it: set, then read back."""

import time
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

_ASK_AGAIN_S = 300.0
# Codes by which stores say "this version has no lock" or "this bucket knows no locks".
_NO_LOCK = {"NoSuchObjectLockConfiguration", "ObjectLockConfigurationNotFoundError"}
UNSUPPORTED = {"InvalidRequest", "NotImplemented", "MethodNotAllowed", "InvalidArgument", "XNotImplemented"}
_HIDDEN = {"AccessDenied", "Forbidden", "403"}


def error_code(error: ClientError) -> str:
    """Return the store's name of an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


class Locks:
    """Locks of one bucket. Whether it has any is asked now and then, never assumed."""

    def __init__(self, client: Any, bucket: str, store: str) -> None:
        self.client = client
        self.bucket = bucket
        self.store = store
        self._asked_at: float | None = None
        self._known: bool | None = None

    @property
    def enabled(self) -> bool:
        """Return whether the bucket says that Object Lock is on."""
        return self._state is True

    @property
    def are_off(self) -> bool:
        """Return whether the bucket says that it has no Object Lock; not being told is neither."""
        return self._state is False

    @property
    def _state(self) -> bool | None:
        if self._asked_at is None or time.monotonic() - self._asked_at > _ASK_AGAIN_S:
            try:
                found = self.client.get_object_lock_configuration(Bucket=self.bucket)
                self._known = found["ObjectLockConfiguration"].get("ObjectLockEnabled") == "Enabled"
            except ClientError as error:
                self._known = None if error_code(error) in _HIDDEN else False
            self._asked_at = time.monotonic()
        return self._known

    def headers(self, lock: str, until: datetime | None) -> dict[str, Any]:
        """Return the lock headers of a put or of starting an upload; some stores ignore them there."""
        if lock == "none" or until is None or not self.enabled:
            return {}
        if lock == "legal_hold":
            return {"ObjectLockLegalHoldStatus": "ON"}
        return {
            "ObjectLockMode": _mode(lock),
            "ObjectLockRetainUntilDate": until,
            "ObjectLockLegalHoldStatus": "ON",
        }

    def apply(self, key: str, version_id: str, lock: str, until: datetime | None) -> dict[str, Any]:
        """Put retention and a legal hold on one version, where they are not there already.

        An earlier date or a weaker mode is never sent: nothing here can shorten a lock. A "legal_hold"
        sets no date: stores refuse to turn GOVERNANCE into COMPLIANCE for whoever may not bypass it.
        Returns what protects the version afterwards, as `read` does.
        """
        seen = self.read(key, version_id)
        if lock == "none" or until is None or not self.enabled or not version_id:
            return seen
        has = datetime.fromisoformat(seen["until"]) if seen["until"] else None
        mode = "COMPLIANCE" if seen["mode"] == "COMPLIANCE" else _mode(lock)
        later = has is None or has < until.replace(microsecond=0) or mode != seen["mode"]
        later = later and lock != "legal_hold"
        if later:
            self.client.put_object_retention(
                Bucket=self.bucket,
                Key=key,
                VersionId=version_id,
                Retention={"Mode": mode, "RetainUntilDate": max(until, has or until)},
            )
        held = seen["legal_hold"] is True
        if not held:
            self.hold(key, version_id)
        return seen if held and not later else self.read(key, version_id)

    def hold(self, key: str, version_id: str) -> None:
        """Put a legal hold on one version."""
        self.client.put_object_legal_hold(
            Bucket=self.bucket, Key=key, VersionId=version_id, LegalHold={"Status": "ON"}
        )

    def is_held(self, key: str, version_id: str) -> bool | None:
        """Return whether a version has a legal hold; None when we may not look."""
        wanted = {"Bucket": self.bucket, "Key": key, "VersionId": version_id}
        found, known = self._ask(self.client.get_object_legal_hold, wanted, "LegalHold")
        return found.get("Status") == "ON" if known else None

    def let_go(self, key: str, version_id: str) -> None:
        """Take the legal hold off one version; its date stays."""
        if self.enabled and version_id:
            self.client.put_object_legal_hold(
                Bucket=self.bucket, Key=key, VersionId=version_id, LegalHold={"Status": "OFF"}
            )

    def delete(self, key: str, version_id: str) -> None:
        """Delete one version. A lock that still holds makes the store refuse: none is bypassed."""
        version = {"VersionId": version_id} if version_id else {}
        self.client.delete_object(Bucket=self.bucket, Key=key, **version)

    def read(self, key: str, version_id: str) -> dict[str, Any]:
        """Return `{"mode", "until", "legal_hold", "says"}` as the store tells it now.

        `legal_hold` None and `says` "unknown" mean that we may not look, which is not "unlocked".
        """
        if self.are_off:
            says = "not locked: this bucket has no Object Lock"
            return {"mode": None, "until": None, "legal_hold": False, "says": says}
        wanted = {"Bucket": self.bucket, "Key": key} | ({"VersionId": version_id} if version_id else {})
        head = self._head(wanted)
        # What a HEAD leaves out we may just not be allowed to see: then it is asked for by name.
        retention: dict[str, Any] = {
            "Mode": head.get("ObjectLockMode"),
            "RetainUntilDate": head.get("ObjectLockRetainUntilDate"),
        }
        hold: dict[str, Any] = {"Status": head.get("ObjectLockLegalHoldStatus")}
        retention_known = hold_known = True
        if retention["Mode"] is None or retention["RetainUntilDate"] is None:
            retention, retention_known = self._ask(self.client.get_object_retention, wanted, "Retention")
        if hold["Status"] is None:
            hold, hold_known = self._ask(self.client.get_object_legal_hold, wanted, "LegalHold")
        until = retention.get("RetainUntilDate")
        seen: dict[str, Any] = {
            "mode": retention.get("Mode"),
            "until": until.isoformat() if until is not None else None,
            "legal_hold": hold.get("Status") == "ON" if hold_known else None,
        }
        seen["says"] = _says(seen, known=retention_known and hold_known)
        return seen

    def _head(self, wanted: dict[str, str]) -> dict[str, Any]:
        try:
            return dict(self.client.head_object(**wanted))
        except ClientError as error:
            if error_code(error) in _HIDDEN:
                return {}
            raise

    def _ask(self, call: Any, wanted: dict[str, str], name: str) -> tuple[dict[str, Any], bool]:
        try:
            return dict(call(**wanted).get(name) or {}), True
        except ClientError as error:
            if error_code(error) in _HIDDEN:
                return {}, False
            if error_code(error) in _NO_LOCK | UNSUPPORTED:
                return {}, True
            raise


def _mode(lock: str) -> str:
    return "COMPLIANCE" if lock == "compliance" else "GOVERNANCE"


def _says(seen: dict[str, Any], *, known: bool) -> str:
    if seen["until"] and seen["legal_hold"]:
        return f"locked until {seen['until'][:10]} ({seen['mode'].lower()}) and by a legal hold"
    if seen["until"]:
        return f"locked until {seen['until'][:10]} ({seen['mode'].lower()})"
    if seen["legal_hold"]:
        return "locked by a legal hold"
    return "not locked" if known else "unknown: this server may not read the lock"
