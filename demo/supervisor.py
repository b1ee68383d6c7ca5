"""The demo's supervisor: waits for an approval, takes the permit, checks it offline.

It trusts one key, pinned when the run was launched (long before anything failed), and nothing the
server says later can change that.
"""

import json
import threading
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from andon import hold
from andon.client import Client
from andon.permit import Permit

WAIT_S = 20.0


def pin_keys(server_url: str) -> list[str]:
    """Return the fingerprints the server publishes, to be pinned at launch."""
    with urllib.request.urlopen(f"{server_url}/.well-known/andon-keys.json", timeout=10) as answer:
        return [key["key_id"] for key in json.load(answer)["keys"]]


class Supervisor:
    """Brings a held run back, and only with a permit.

    Args:
        client: signed sender of the run.
        checkpoint_dir: where `andon-hold.json` lies.
        trusted: fingerprints pinned at launch.
    """

    def __init__(self, client: Client, checkpoint_dir: Path, trusted: list[str]) -> None:
        self.client, self.checkpoint_dir, self.trusted = client, checkpoint_dir, trusted

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

    def take_permit(self, directive: dict[str, Any], attempt: int) -> tuple[Permit, dict[str, Any]]:
        """Exchange the approval for its permit and end the hold with it, offline.

        The exchange carries one id however often it is tried, so a lost answer costs nothing.

        Raises:
            Held: the permit does not end this hold (wrong key, run, attempt, incident or time).
        """
        exchange_id = f"exchange-{uuid.uuid4()}"
        document = self.client.resume(directive["incident"], attempt, exchange_id)
        permit = hold.release(self.checkpoint_dir, document, trusted=self.trusted, at=time.time())
        return permit, document
