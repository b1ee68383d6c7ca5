"""A run as the tests of incidents need it: real rows, posted through the real signals."""

import itertools
from typing import Any

from django.db import transaction
from django.utils import timezone

from andon.policy import Policy
from evidence.models import Dossier, Item
from incidents.models import Incident, Permit
from runs.directives import current, set_directive
from runs.locks import lock_run
from runs.models import (
    Attempt,
    Checkpoint,
    DirectiveAck,
    Event,
    Finding,
    Membership,
    Person,
    PolicyVersion,
    Project,
    Role,
    Run,
    RunProgress,
)
from runs.signals import attempt_launched, checkpoint_changed, findings_stored

BATCH = 32  # samples a step takes
_numbers = itertools.count(1)


def person(project: Project, name: str, *roles: str) -> Person:
    """Make a member of `project`."""
    one = Person.objects.create_user(name, password=f"{name}-password")
    Membership.objects.create(project=project, person=one, roles=list(roles))
    return one


class World:
    """One run with its trainer: launches, steps, checkpoints and findings."""

    def __init__(self, project: Project, slug: str = "pt-13b-web3", world_size: int = 4) -> None:
        self.run = Run.objects.create(project=project, slug=slug)
        RunProgress.objects.create(run=self.run)
        with transaction.atomic():
            lock_run(self.run.pk)
            set_directive(run=self.run, kind="continue", attempt=1)
        self.world_size = world_size
        self.launch(1)

    def policy(self, **changes: Any) -> None:
        """Set the run's policy: each keyword is a section with the fields to change."""
        document: dict[str, Any] = Policy().document()
        for section, fields in changes.items():
            if isinstance(fields, dict):
                document[section] = {**document[section], **fields}
            else:
                document[section] = fields
        PolicyVersion.objects.create(
            project=self.run.project,
            run=self.run,
            number=next(_numbers),
            document=document,
            digest=f"{next(_numbers):064d}",
        )

    def launch(self, number: int, permit: str = "", *, reported: bool = True) -> Attempt:
        """Launch an attempt as its supervisor reports it."""
        half = self.world_size // 2
        attempt, _ = Attempt.objects.update_or_create(
            run=self.run,
            number=number,
            defaults={
                "launched_at": timezone.now(),
                "launch_reported": reported,
                "world_size": self.world_size if reported else None,
                "nodes": [
                    {"node": "node-00", "ranks": list(range(half))},
                    {"node": "node-01", "ranks": list(range(half, self.world_size))},
                ],
                "permit_id": permit,
                "first_step": 1 if number == 1 else None,
            },
        )
        with transaction.atomic():
            attempt_launched.send(sender=Run, run=self.run, attempt=attempt, permit_id=permit)
        return attempt

    def checkpoint(self, step: int, *, attempt: int = 1, state: str = "verified") -> Checkpoint:
        """Commit a checkpoint that keeps all four positions."""
        kept = Checkpoint.objects.create(
            run=self.run,
            attempt=attempt,
            step=step,
            uri=f"file:///ckpt/{self.run.slug}/step-{step}-{attempt}",
            state=state,
            digest=f"{step:064x}",
            files=[{"path": "model.pt", "bytes": 10, "sha256": f"{step:064x}"}],
            bytes_total=10,
            loader_position=step * BATCH,
            consumed_samples=step * BATCH - 5,
            optimizer_step=step,
            schedule_position=step + 7,
            committed_at=timezone.now(),
            verified_at=timezone.now() if state == "verified" else None,
        )
        with transaction.atomic():
            checkpoint_changed.send(sender=Run, run=self.run, checkpoint=kept)
        return kept

    def steps(self, first: int, last: int, *, attempt: int = 1) -> None:
        """Report steps with the loader's position after each."""
        now = timezone.now()
        for step in range(first, last + 1):
            Event.objects.create(
                received_at=now,
                run_id=self.run.pk,
                attempt=attempt,
                type="step",
                step=step,
                occurred_at=now,
                data={"loss": 2.5, "loader_position": step * BATCH, "step_time_s": 2.0},
                webhook_id=f"steps-{next(_numbers)}",
            )
        RunProgress.objects.update_or_create(
            run=self.run, defaults={"attempt": attempt, "step": last, "step_at": now, "last_post_at": now}
        )
        self.run = Run.objects.get(pk=self.run.pk)

    def finding(self, kind: str = "loss_spike", *, send: bool = True, **fields: Any) -> Finding:
        """Store one finding and tell, as ingest does."""
        defaults: dict[str, Any] = {
            "attempt": 1,
            "rule": "spike" if kind.endswith("spike") else "nonfinite",
            "mode": "act",
            "severity": "halt",
            "step": 1002,
            "series": "loss",
            "view": "reduced",
            "score": 13.0,
            "numbers": {"since": 1000, "z": 13.0} if kind.endswith("spike") else {"loss": "nan"},
            "detail": f"{kind.replace('_', ' ')} seen",
            "detector": "spike" if kind.endswith("spike") else "nonfinite",
            "detector_version": "1",
            "policy_digest": "0" * 64,
            "occurred_at": timezone.now(),
            "received_at": timezone.now(),
        }
        values = defaults | fields
        values.setdefault("needs_incident", values["mode"] == "act" and not values.get("backfill"))
        row = Finding.objects.create(run=self.run, kind=kind, **values)
        if send:
            self.tell(row)
        return row

    def tell(self, *rows: Finding) -> None:
        """Send findings in one transaction, as ingest does."""
        with transaction.atomic():
            findings_stored.send(sender=Finding, run=self.run, findings=list(rows))

    def spike(self, at: int = 1002, since: int = 1000, **fields: Any) -> Finding:
        """A loss spike that halts at its third strike."""
        return self.finding("loss_spike", step=at, numbers={"since": since, "z": 13.0}, **fields)

    def stop(self, *, attempt: int = 1, state: str = "held", ranks: list[int] | None = None) -> None:
        """Every rank says that it holds, as the directive in force asked."""
        directive = current(self.run.pk)
        assert directive is not None
        now = timezone.now()
        DirectiveAck.objects.create(
            run=self.run,
            attempt=attempt,
            seq=directive.seq,
            state=state,
            ranks=list(range(self.world_size)) if ranks is None else ranks,
            occurred_at=now,
            received_at=now,
        )

    def incident(self) -> Incident:
        """Return the newest incident."""
        return (
            Incident.objects.select_related("run", "run__project", "dossier")
            .filter(run=self.run)
            .latest("id")
        )

    def directive(self) -> str:
        """Return the kind of the directive in force."""
        found = current(self.run.pk)
        assert found is not None
        return str(found.kind)

    def permit(self) -> Permit:
        """Return the newest permit."""
        return Permit.objects.filter(run=self.run).latest("id")


def seal(dossier: Dossier) -> None:
    """Do what the vault's workers do in the end: every required item is sealed."""
    for item in Item.objects.filter(dossier=dossier, required=True).exclude(state=Item.State.NOT_APPLICABLE):
        item.state, item.sealed_at, item.held_at = Item.State.SEALED, timezone.now(), timezone.now()
        item.digest = item.digest or f"{item.pk:064x}"
        item.save()


def held(project: Project, slug: str = "pt-13b-web3", *, stopped: bool = True) -> World:
    """A run held by a spike at 1000 to 1002: evidence sealed, the plan complete.

    Args:
        stopped: whether all ranks have said that they hold.
    """
    world = World(project, slug)
    for step in (800, 900, 950, 1000):
        world.checkpoint(step)
    world.steps(998, 1002)
    world.spike()
    if stopped:
        world.stop()
    seal(world.incident().dossier)
    return world


__all__ = ["BATCH", "Role", "World", "held", "person", "seal"]
