"""`make demo CHECK=1`: plays both people, and holds every stage to what the recording truly contains."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.people import Page, Person
from demo.server import Server
from demo.stages import StageFailed


def until(what: str, probe: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Return the first truthy answer of `probe`.

    Raises:
        StageFailed: there was none within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = probe()
        if answer:
            return answer
        time.sleep(0.3)
    raise StageFailed(f"not within {timeout_s:.0f} s: {what}")


def expect(what: str, seen: object, wanted: object) -> None:
    """Raise StageFailed unless `seen` equals `wanted`."""
    if seen != wanted:
        raise StageFailed(f"{what}: expected {wanted!r}, saw {seen!r}")


class Checker:
    """Reads what the server says, by API and by page, and compares it with the recording's answer."""

    def __init__(self, server: Server, run: str, token: str, answer: dict[str, Any]) -> None:
        self.server, self.run, self.token, self.answer = server, run, token, answer

    def api(self, path: str) -> Any:
        """Read one document of the API."""
        request = urllib.request.Request(f"{self.server.url}/api/v1{path}")
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)

    def incident(self) -> dict[str, Any] | None:
        """Return the run's newest incident, or None."""
        items = self.api(f"/incidents?run={self.run}")["items"]
        return items[0] if items else None

    def first_bad_is_right(self) -> dict[str, Any]:
        """Wait for the incident and compare its first-bad cell with what truly happened.

        The post that opens the incident may carry reduced values only; the ranks' own follow within
        the same step and move the first-bad cell to where it began.
        """
        wanted = {name: self.answer[name] for name in ("step", "ranks", "layer")}

        def found() -> dict[str, Any] | None:
            incident = self.incident()
            if incident is None:
                return None
            first = incident["first_bad"]
            return incident if {name: first[name] for name in wanted} == wanted else None

        try:
            incident: dict[str, Any] = until(f"an incident whose first bad cell is {wanted}", found, 90)
        except StageFailed as error:
            seen = (self.incident() or {}).get("first_bad")
            raise StageFailed(f"{error}; it says {seen}") from error
        return incident

    def evidence_is_sealed(self) -> dict[str, Any]:
        """Wait until every required item is sealed (or does not apply)."""

        def sealed() -> dict[str, Any] | None:
            evidence = (self.incident() or {}).get("evidence", {})
            if evidence.get("missing"):
                raise StageFailed(f"evidence is missing: {evidence}")
            done = evidence and evidence["sealed"] >= evidence["required"]
            return evidence if done else None

        found: dict[str, Any] = until("all required evidence is sealed", sealed)
        return found

    def spike_is_found(self, mode: str) -> bool:
        """Whether the run has a halt finding of the spike rule at the recording's halt step."""
        found = [
            finding
            for finding in self.api(f"/runs/{self.run}/findings")["items"]
            if finding["rule"] == "spike" and finding["severity"] == "halt"
        ]
        if not found:
            return False
        expect("mode of the spike finding", found[0]["mode"], mode)
        expect("step of the spike's halt", found[-1]["step"], self.answer["halt_step"])
        return True

    def page_says(self, page: Page, *words: str) -> None:
        """Raise StageFailed unless the page shows all of `words`."""
        expect(f"{page.url} status", page.status, 200)
        text = page.text
        for word in words:
            if word not in text:
                raise StageFailed(f"{page.url} does not say {word!r}")

    def request(self, person: Person, incident: str) -> None:
        """One person asks to resume; the same person's approval must be refused."""
        page = person.submit(person.get(f"/incidents/{incident}"), "/request", note="skip the corrupt sample")
        expect("status of the request", page.status, 200)
        again = person.get(f"/incidents/{incident}/approve")
        forms = [form for form in again.parsed().forms if form.action.endswith("/approve")]
        if forms:
            refused = person.submit(again, "/approve", password=person.password)
            if "Approved" in refused.text:
                raise StageFailed("the requester could approve")

    def approve(self, person: Person, incident: str) -> Page:
        """Another person approves, giving the password again."""
        page = person.get(f"/incidents/{incident}/approve")
        return person.submit(page, "/approve", password=person.password)

    def ledger_shows_the_rollback(self, checkpoint_step: int) -> None:
        """The ledger holds one rollback row, complete, and its chain verifies."""
        rows = [row for row in self.api(f"/runs/{self.run}/ledger")["items"] if row["action"] == "rollback"]
        expect("rollback rows in the ledger", len(rows), 1)
        row = rows[0]
        expect("checkpoint of the rollback", row["checkpoint"]["step"], checkpoint_step)
        expect("ranks of the rollback", bool(row["ranks"]), True)
        names = {"loader_position", "consumed_samples", "optimizer_step", "schedule_position"}
        for side in ("before", "after"):
            positions = row[side] or {}
            if names - positions.keys() or None in (positions[name] for name in names):
                raise StageFailed(f"the rollback's positions {side} are incomplete: {positions}")

    def bag_verifies(self, incident: str, fingerprint: str) -> None:
        """Export the evidence bag and let `andon verify` check it offline."""
        bag = self.server.data_dir / "check-bag"
        self.server.manage("export_bag", incident, str(bag))
        andon = Path(sys.executable).parent / "andon"
        done = subprocess.run(
            [str(andon), "verify", str(bag), "--key", fingerprint],
            capture_output=True,
            text=True,
            check=False,
        )
        expect(
            "exit code of `andon verify`", (done.returncode, done.stdout[-300:] + done.stderr[-300:])[0], 0
        )
