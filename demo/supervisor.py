"""The demo's supervisor: waits for an approval, takes the permit, checks it offline.

It trusts the key that was pinned when the run was launched (long before anything failed), and what that
key hands over to; nothing else the server says can change that.
"""

import json
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

from andon import permit
from andon.client import AnswerError, Client, Unreachable
from andon.permit import Permit

WAIT_S = 20.0
EXCHANGE_S = 300.0  # how long a server that is away is asked for the permit


def pin_keys(server_url: str) -> list[str]:
    """Return the fingerprint of the key the server signs with, to be pinned at launch.

    Only that one: keys before it are trusted as far as they handed over to it.
    """
    with urllib.request.urlopen(f"{server_url}/.well-known/andon-keys.json", timeout=10) as answer:
        return [key["key_id"] for key in json.load(answer)["keys"] if key["current"]]


class Supervisor:
    """Brings a held run back, and only with a permit.

    Args:
        client: signed sender of the run.
        trusted: fingerprints pinned at launch.
    """

    def __init__(self, client: Client, run: str, trusted: list[str]) -> None:
        self.client, self.run, self.trusted = client, run, trusted

    def wait_for_approval(self, stop: threading.Event) -> dict[str, Any] | None:
        """Wait until the directive says resume or rollback; None when `stop` was set first."""
        after = 0
        while not stop.is_set():
            directive = self.client.wait_directive(after, WAIT_S)
            if directive is None:
                stop.wait(1.0)
                continue
            if directive["kind"] in {"resume", "rollback"}:
                return directive
            after = directive["seq"]
        return None

    def take_permit(
        self, directive: dict[str, Any], attempt: int, check: Callable[[Permit], None]
    ) -> dict[str, Any]:
        """Exchange the approval for its permit and return it, verified offline.

        The exchange carries one id however often it is tried, so a lost answer costs nothing; a server
        that is away or overloaded is asked again for `EXCHANGE_S` seconds. `check` raises when this
        job cannot do what the permit says; the hold then stays.

        Raises:
            AnswerError: refused: not approved, changed since, exchanged by another, expired.
            Unreachable: no answer in all that time.
            PermitError: not signed by the pinned key, or for another run, attempt or time.
        """
        exchange_id = f"exchange-{uuid.uuid4()}"
        document = self._exchange(directive["incident"], attempt, exchange_id)
        trusted = self.client.trusted or self.trusted
        check(permit.verify(document, trusted=trusted, at=time.time(), run=self.run, attempt=attempt))
        return document

    def _exchange(self, incident: str, attempt: int, exchange_id: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + EXCHANGE_S
        while True:
            try:
                return self.client.resume(incident, attempt, exchange_id)
            except (Unreachable, AnswerError) as error:
                # A refusal is a refusal; 429, 5xx and ranks that have not said that they stopped: "not now".
                refused = isinstance(error, AnswerError) and error.status < 500 and error.status != 429
                if isinstance(error, AnswerError) and error.type.endswith("not-contained"):
                    refused = False
                if refused or time.monotonic() > deadline_s:
                    raise
            time.sleep(1.0)
