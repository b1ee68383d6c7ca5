"""`python -m demo.incidents`: ten recorded incidents of different families on one server, to look at.

Two are recordings of runs that failed here, eight are public failures told with their own numbers
(`demo.cases`). People sign in as in the demo. Ctrl-C stops everything.
"""

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from andon import policy
from demo.__main__ import APPROVER, QUIET, RECORDING, REQUESTER
from demo.cases import CASES, Case
from demo.people import Person
from demo.server import REPOSITORY, CannotStart, Server, free_port, fresh_directory, json_object
from demo.stages import complain, say
from demo.supervisor import pin_keys
from demo.teller import Teller
from demo.trainers import RecordedTrainer, policy_of

SPEED = 4.0  # of the recordings
PLAYED_S = 150.0
HEARTBEAT_S = 15.0
# Long enough to be looked at; ranks of a recording and of a case wait in place until then.
WAIT = {"hold": {"deadline_s": 6 * 3600.0}}


class Incidents:
    """A server with ten incidents, and the trainers that keep their ranks alive."""

    def __init__(self, data_dir: Path, port: int) -> None:
        self.data_dir = fresh_directory(data_dir)
        (self.data_dir / "demo.pid").write_text(str(os.getpid()), "utf-8")
        self.files = self.data_dir / "trainer"
        self.files.mkdir()
        self.server = Server(self.data_dir, port, [self.files])
        # Ten runs fail at once here: the rules that hold them are not to be doubted for it.
        self.server.environment["ANDON_BREAKER_RUNS"] = "1000"
        self.passwords: dict[str, str] = {}
        self.trusted: list[str] = []
        self.kept = ExitStack()
        self.standing: list[tuple[Teller, int]] = []

    def start(self) -> None:
        """Start the server and make two people."""
        self.server.start()
        self.kept.callback(self.server.stop)
        self.trusted = pin_keys(self.server.url)
        for name, role in ((REQUESTER, "responder"), (APPROVER, "approver")):
            person = self.server.manage_json("create_person", name, "--role", role)
            self.passwords[name] = str(person["password"])

    def run(self, name: str, *policies: str) -> str:
        """Create a run with policies laid over each other; returns its secret."""
        document: dict[str, Any] = dict(WAIT)
        for one in policies:
            document = policy.merge(document, json.loads(one))
        setting = ("set_policy", name, "-", "--why", "as its case needs")
        made, _ = self.server.manage_all([("create_run", name), setting], json.dumps(document))
        return str(json_object(made)["secret"])

    def tell(self, case: Case) -> None:
        """Tell one public case; its ranks stop when they are told to."""
        secret = self.run(case.run, *([json.dumps(case.policy)] if case.policy else []))
        teller = Teller(self.server.url, case.run, secret, self.files / case.run, **case.layout)
        self.kept.callback(teller.close)
        stops_at = case.tell(teller)
        if case.held_by_hand:
            mira = Person(self.server.url, REQUESTER, self.passwords[REQUESTER])
            mira.sign_in()
            mira.submit(mira.get(f"/runs/{case.run}"), "/hold", why=case.held_by_hand)
        if stops_at is not None:
            held = teller.obey(stops_at, but=case.silent)
            say(f"  {case.run}: {'held' if held else 'NOT held'} at step {stops_at:,}")
        else:
            teller.heartbeat(case.layout["last_step"], state="training")
            say(f"  {case.run}: goes on")
        self.standing.append((teller, stops_at or case.layout["last_step"]))

    def play(self, run: str, recording: Path, *policies: str) -> RecordedTrainer:
        """Start a recording."""
        trainer = RecordedTrainer(
            recording=recording,
            server_url=self.server.url,
            run=run,
            secret=self.run(run, policy_of(recording), *policies),
            directory=self.files / run,
            speed=SPEED,
            trusted=self.trusted,
        )
        self.kept.callback(trainer.close)
        trainer.start()
        return trainer

    def fill(self) -> None:
        """Open all ten incidents."""
        played = (
            self.play("nan-one-rank", RECORDING),
            self.play("quiet-spike", QUIET, '{"modes": {"spike": "act"}}'),
        )
        for case in CASES:
            self.tell(case)
        until = time.monotonic() + PLAYED_S
        while time.monotonic() < until and not all(_holds(one) for one in played):
            time.sleep(1.0)

    def heartbeat(self) -> None:
        """Say that the ranks of every told run are alive."""
        for teller, step in self.standing:
            teller.heartbeat(step)

    def close(self) -> None:
        """Stop everything."""
        self.kept.close()
        (self.data_dir / "demo.pid").unlink(missing_ok=True)


def _holds(trainer: RecordedTrainer) -> bool:
    return trainer.ended_well() is not None or (trainer.checkpoint_dir / "andon-hold.json").exists()


def main() -> int:
    """Open ten incidents and stay until Ctrl-C; returns the exit code."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    chosen = os.environ.get("ANDON_DATA_DIR")
    try:
        incidents = Incidents(
            Path(chosen or REPOSITORY / "var" / "incidents").resolve(),
            free_port(int(os.environ.get("ANDON_PORT", "8000"))),
        )
    except CannotStart as error:
        complain(f"incidents: {error}")
        return 2
    try:
        incidents.start()
        incidents.fill()
        say(f"\n  Open {incidents.server.url}/incidents")
        for name, password in incidents.passwords.items():
            say(f"    {name:<6} {password}")
        while True:
            time.sleep(HEARTBEAT_S)
            incidents.heartbeat()
    except KeyboardInterrupt:
        say("\nstopping")
        return 0
    except CannotStart as error:
        complain(f"incidents: {error}")
        return 1
    finally:
        incidents.close()


if __name__ == "__main__":
    sys.exit(main())
