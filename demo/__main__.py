"""`make demo`: the whole loop on one machine, on a failure that really happened.

Starts the server, lets a run fail into it, and waits for two people in a browser: one requests
resume, the other approves. `CHECK=1` plays both people and exits 0 only if every stage held;
`LIVE=1` trains for real instead of replaying a recording.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from andon.client import Client
from demo.check import Checker, expect, until
from demo.people import Person
from demo.server import REPOSITORY, CannotStart, Server, free_port, fresh_directory, json_object
from demo.stages import StageFailed, Stages, complain, say
from demo.supervisor import Supervisor, pin_keys
from demo.trainers import LiveTrainer, RecordedTrainer, Trainer, policy_of

RUN = "demo-gpt"
RECORDING = REPOSITORY / "demo" / "recordings" / "nan-one-rank.zip"
QUIET = REPOSITORY / "demo" / "recordings" / "quiet-spike.zip"
REQUESTER, APPROVER = "mira", "jonas"


class Demo:
    """One demo: a server, a failing run, a supervisor, and what people need to take part."""

    def __init__(self, *, live: bool, speed: float, data_dir: Path | None = None) -> None:
        chosen = data_dir or os.environ.get("ANDON_DATA_DIR")
        self.data_dir = fresh_directory(Path(chosen or REPOSITORY / "var" / "demo").resolve())
        (self.data_dir / "demo.pid").write_text(str(os.getpid()), "utf-8")
        self.live, self.speed = live, speed
        self.trainer_dir = self.data_dir / "trainer"
        self.trainer_dir.mkdir()
        self.server = Server(self.data_dir, free_port(_port()), [self.trainer_dir])
        self.stop = threading.Event()
        self.trainers: list[Trainer] = []
        self.passwords: dict[str, str] = {}

    # --- setting up

    def start(self) -> None:
        """Start the server and create the run and two people."""
        self.server.start()
        self.trusted = pin_keys(self.server.url)
        people = {REQUESTER: "responder", APPROVER: "approver"}
        commands = [("create_person", name, "--role", role) for name, role in people.items()]
        *printed, run, _ = self.server.manage_all([*commands, *_of_a_run(RUN)], policy_of(RECORDING))
        for name, one in zip(people, printed, strict=True):
            self.passwords[name] = str(json_object(one)["password"])
        self.secret = str(json_object(run)["secret"])

    def create_run(self, run: str, policy: str) -> str:
        """Create a run with a policy; return its secret."""
        created, _ = self.server.manage_all(_of_a_run(run), policy)
        return str(json_object(created)["secret"])

    def launch(self) -> Trainer:
        """Start the run that will fail."""
        trainer: Trainer
        if self.live:
            trainer = LiveTrainer(
                server_url=self.server.url,
                run=RUN,
                secret=self.secret,
                directory=self.trainer_dir / RUN,
                trusted=self.trusted,
            )
        else:
            trainer = self.replay(RUN, RECORDING, self.secret)
        trainer.start()
        self.trainers.append(trainer)
        self.supervisor = Supervisor(Client(self.server.url, RUN, self.secret), RUN, self.trusted)
        return trainer

    def replay(self, run: str, recording: Path, secret: str) -> RecordedTrainer:
        """Return a trainer that plays `recording` into `run`."""
        return RecordedTrainer(
            recording=recording,
            server_url=self.server.url,
            run=run,
            secret=secret,
            directory=self.trainer_dir / run,
            speed=self.speed,
            trusted=self.trusted,
        )

    def launch_quiet(self, rule: str) -> str:
        """Start the second, quieter failure with the spike rule in `rule` (observe or act)."""
        run = f"demo-spike-{rule}"
        secret = self.create_run(run, policy_of(QUIET))
        self.server.manage_all([("set_policy", run, "-")], f'{{"modes": {{"spike": "{rule}"}}}}')
        trainer = self.replay(run, QUIET, secret)
        trainer.start()
        self.trainers.append(trainer)
        return run

    # --- the supervisor

    def wait_and_continue(self, trainer: Trainer, attempt: int) -> dict[str, Any] | None:
        """Wait for an approval, take and check its permit, and let the run go on."""
        directive = self.supervisor.wait_for_approval(self.stop)
        if directive is None:
            return None
        say(f"  supervisor: the directive is {directive['kind']}, taking the permit")
        document = self.supervisor.take_permit(directive, attempt, trainer.check)
        skip = document.get("skip")
        skipped = f", skipping samples {skip['from']:,} to {skip['to']:,}" if skip else ""
        say(
            f"  supervisor: permit {document['permit']} verified offline: attempt {document['attempt']} "
            f"from step {document['checkpoint']['step']:,}{skipped}"
        )
        trainer.go_on(document)
        return document

    def close(self) -> None:
        """Stop everything; leaves no process."""
        self.stop.set()
        for trainer in self.trainers:
            trainer.close()
        self.server.stop()
        (self.data_dir / "demo.pid").unlink(missing_ok=True)


def _of_a_run(run: str) -> list[tuple[str, ...]]:
    return [("create_run", run), ("set_policy", run, "-", "--why", "sizes of the demo's short run")]


def _port() -> int:
    text = os.environ.get("ANDON_PORT", "8000")
    try:
        return int(text)
    except ValueError:
        raise CannotStart(f"ANDON_PORT={text!r}: expected a port number") from None


def show(demo: Demo) -> None:
    """The demo for a person: print where to look, then supervise until Ctrl-C."""
    demo.start()
    trainer = demo.launch()
    say()
    say(f"  Open {demo.server.url}")
    say()
    say(f"    {REQUESTER:<6} {demo.passwords[REQUESTER]}   asks (responder)")
    say(f"    {APPROVER:<6} {demo.passwords[APPROVER]}   approves (approver)")
    say()
    say(f"  1. Sign in as {REQUESTER} and watch {RUN}: within a minute it goes bad and is held.")
    say("  2. Open the incident: which rank and step, is the evidence sealed, what may be pressed.")
    say(f"  3. Request resume. Sign in as {APPROVER} in a private window and approve.")
    say("  4. This terminal takes the permit, checks it offline, and the run goes on. Read the ledger.")
    say()
    say("  Ctrl-C stops everything.")
    say()
    attempt = 2
    while not demo.stop.is_set():
        permit = demo.wait_and_continue(trainer, attempt)
        if permit is None:
            return
        say(f"  The run goes on; its ledger: {demo.server.url}/runs/{RUN}/ledger")
        attempt += 1


def play(demo: Demo, stages: Stages) -> None:
    """The demo with both people played; raises when a stage does not hold."""
    with stages.stage("the server is up and ready"):
        demo.start()
    token = demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
    with stages.stage("the run starts posting"):
        trainer = demo.launch()
        checker = Checker(demo.server, RUN, token, trainer.answer)
    with stages.stage("an incident opens and names the right rank, step and layer"):
        incident = checker.first_bad_is_right()
    incident_id = incident["id"]
    mira = Person(demo.server.url, REQUESTER, demo.passwords[REQUESTER])
    jonas = Person(demo.server.url, APPROVER, demo.passwords[APPROVER])
    with stages.stage("the run is held, all ranks obey"):
        expect("directive", incident["directive"]["kind"], "hold")
        until("all ranks obey", lambda: _obeyed(checker), 60)
        expect("hold file", (trainer.checkpoint_dir / "andon-hold.json").exists(), True)
    with stages.stage("all required evidence is sealed"):
        checker.evidence_is_sealed()
    with stages.stage("the page says what broke first, and where"):
        mira.sign_in()
        rank = trainer.answer["ranks"][0]
        checker.page_says(
            mira.get(f"/incidents/{incident_id}"), f"rank {rank}", f"{trainer.answer['step']:,}"
        )
    with stages.stage("one person requests resume and cannot approve it"):
        checker.request(mira, incident_id)
    with stages.stage("another person approves"):
        jonas.sign_in()
        expect("status of the approval", checker.approve(jonas, incident_id).status, 200)
    with stages.stage("the supervisor takes the permit and verifies it offline"):
        document = demo.wait_and_continue(trainer, 2)
        if document is None:
            raise StageFailed("the supervisor was stopped")
        expect("checkpoint of the permit", document["checkpoint"]["step"], trainer.answer["last_good_step"])
    with stages.stage("the run goes on by the plan"):
        until("the next attempt comes to its end", lambda: trainer.ended_well() is not None, 180)
        expect("the next attempt ended unheld", trainer.ended_well(), True)
        until("the incident is watched or resolved", lambda: _watched(checker), 60)
    with stages.stage("the ledger shows the rollback, complete"):
        checker.ledger_shows_the_rollback(trainer.answer["last_good_step"])
        checker.page_says(mira.get(f"/runs/{RUN}/ledger"), "rollback")
    if not demo.live:
        quiet(demo, stages, token)
    with stages.stage("the exported bag verifies offline"):
        checker.bag_verifies(incident_id, demo.trusted[0])


def quiet(demo: Demo, stages: Stages, token: str) -> None:
    """The quieter failure: a finding when the spike rule observes, a hold when it acts."""
    with stages.stage("a spike without a NaN: only a finding when the rule observes"):
        observed = demo.launch_quiet("observe")
        trainer = demo.trainers[-1]
        until("the run comes to its end", lambda: trainer.ended_well() is not None, 180)
        expect("the run ended unheld", trainer.ended_well(), True)
        checker = Checker(demo.server, observed, token, trainer.answer)
        until("the spike is found", lambda: checker.spike_is_found("observe"), 60)
        expect("incidents of the observed run", checker.incident(), None)
    with stages.stage("the same spike holds the run when the rule acts"):
        acted = demo.launch_quiet("act")
        trainer = demo.trainers[-1]
        checker = Checker(demo.server, acted, token, trainer.answer)
        until("the run is held", lambda: told_to_hold(checker), 120)
        until("the spike is found", lambda: checker.spike_is_found("act"), 60)


def told_to_hold(checker: Checker) -> bool:
    """Whether the run's incident has turned its directive to hold."""
    incident = checker.incident()
    return incident is not None and bool(incident["directive"]["kind"] == "hold")


def _obeyed(checker: Checker) -> bool:
    directive = (checker.incident() or {})["directive"]
    return bool(directive["of"] > 0 and directive["obeyed"] == directive["of"])


def _watched(checker: Checker) -> bool:
    return str((checker.incident() or {})["state"]) in {"watching", "resolved"}


def main() -> int:
    """Run the demo; returns the exit code."""
    checking, live = bool(os.environ.get("CHECK")), bool(os.environ.get("LIVE"))
    stages = Stages()

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell that starts this in the background hands it down ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        demo = Demo(live=live, speed=float(os.environ.get("SPEED", "1")))
    except CannotStart as error:
        complain(f"demo: {error}")
        return 2
    try:
        if checking:
            play(demo, stages)
        else:
            show(demo)
    except KeyboardInterrupt:
        say("\nstopping")
        return 130 if checking else 0
    except (CannotStart, StageFailed) as error:
        complain(f"demo: {error}")
        return 1
    finally:
        # A second Ctrl-C must not cut the stopping short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        demo.close()
    say(f"every stage held, {time.monotonic() - stages.began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
