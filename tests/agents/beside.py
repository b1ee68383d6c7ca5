"""A node beside a running server: its disk, which the server cannot read, and its agent as a process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from django.utils import timezone

from andon.signing import new_secret
from evidence.models import Dossier
from runs.models import Attempt, FirstBad, Run, RunSecret, Work
from runs.work import run_due

ROOT = Path(__file__).resolve().parents[2]
# Stops an agent in front of a function: it says so, and waits to be killed.
STOP = """
import importlib, sys, time
path, name = {stage!r}.rsplit(":", 1)
module, _, owner = path.partition("/")
where = importlib.import_module(module)
where = getattr(where, owner) if owner else where
real, calls = getattr(where, name), []
def stop(*given, **named):
    calls.append(1)
    if len(calls) > {after}:
        print("here", flush=True)
        time.sleep(600)
    return real(*given, **named)
setattr(where, name, stop)
"""
RUN = "from andon.cli import main\nraise SystemExit(main({arguments!r}))\n"


@dataclass
class Node:
    """One node of a run: `disk` is under the agent's root and under none of the server's."""

    url: str
    run: Run
    disk: Path
    state: Path
    name: str = "n1"
    secret: str = field(default_factory=new_secret)
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.disk.mkdir(parents=True, exist_ok=True)
        RunSecret.objects.get_or_create(run=self.run, secret=self.secret)

    def agent(self, *more: str, stage: str = "", after: int = 0) -> "subprocess.Popen[str]":
        """Start the agent; `stage` ("module/Class:function") is where it stops, after so many calls."""
        arguments = [
            *("agent", "--url", self.url, "--run", self.run.slug, "--node", self.name),
            *("--root", str(self.disk), "--state", str(self.state), "--every", "0.2", *more),
        ]
        code = (STOP.format(stage=stage, after=after) if stage else "") + RUN.format(arguments=arguments)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("ANDON_", "DJANGO_"))
        }
        started = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=kept | {"ANDON_RUN_SECRET": self.secret},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(started)
        return started

    def kill(self) -> None:
        """End every agent at once, as the kernel would."""
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.started.clear()


def stopped_at(agent: "subprocess.Popen[str]") -> bool:
    """Return whether an agent has said that it stopped at its stage; asked over and over, it never waits."""
    assert agent.stdout is not None
    os.set_blocking(agent.stdout.fileno(), False)
    return agent.stdout.readline() == "here\n"


def work_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Do the server's work, over and over, until something holds."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, Work.objects.filter(state="due").values_list("kind", "error")
        Work.objects.filter(state="due").update(not_before=timezone.now())
        run_due()
        time.sleep(0.05)


def states(dossier: Dossier) -> dict[str, str]:
    return dict(dossier.items.values_list("kind", "state"))


def suspect(run: Run, rank: int) -> None:
    """Let a rank of attempt 1 be the first bad one."""
    FirstBad.objects.create(
        run=run,
        attempt=1,
        stream="rank",
        lane=str(rank),
        rank=-1,
        step=1000,
        phase=1,
        view="local",
        received_at=timezone.now(),
    )


def contain(run: Run) -> None:
    """Let the attempt be over: nobody writes logs any more."""
    Attempt.objects.filter(run=run).update(exited_at=timezone.now())
