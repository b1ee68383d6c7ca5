"""No sequence of calls resumes a held run without a valid permit, or yields one nobody approved."""

import uuid

import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from evidence.actions import waive
from evidence.models import Item
from evidence.refused import Refused as EvidenceRefused
from incidents import actions, approval, launches, ledger, opening, review, watching
from incidents.canonical import sha256
from incidents.models import Approval, Incident, Permit, ResumeRequest
from incidents.refused import Refused
from runs.models import Attempt, Directive, Membership, Person, Project, Role, RunProgress
from tests.incidents.world import World, seal

PEOPLE = {
    "tomas": [Role.RESPONDER],
    "mira": [Role.RESPONDER, Role.APPROVER],
    "jonas": [Role.APPROVER],
    "vera": [Role.VIEWER],
    "charlie": None,
}
who = st.sampled_from(sorted(PEOPLE))
# These two only ever do what is right: without them every example ends early, with everybody involved.
CALM = {"ask": [Role.RESPONDER], "ada": [Role.APPROVER]}


class HeldRun(RuleBasedStateMachine):
    """Any mix of people, trainers, supervisors and sweeps against one run that is held."""

    @initialize()
    def begin(self) -> None:
        self.savepoint = transaction.atomic()
        self.savepoint.__enter__()
        project = Project.objects.create(slug=f"p-{uuid.uuid4().hex[:8]}", name="P")
        self.people = {}
        for name, roles in (PEOPLE | CALM).items():
            person = Person.objects.create(username=f"{name}-{uuid.uuid4().hex[:6]}")
            if roles is not None:
                Membership.objects.create(project=project, person=person, roles=roles)
            self.people[name] = person
        self.world = World(project, f"r-{uuid.uuid4().hex[:8]}")
        for step in (800, 850, 900, 1000):
            self.world.checkpoint(step)
        self.world.steps(1000, 1002)
        self.world.spike()
        seal(self.incident.dossier)
        self.digests = ["0" * 64]
        self.permits: list[str] = []
        self.taken: dict[str, str] = {}
        self.posts = 0

    def teardown(self) -> None:
        if hasattr(self, "savepoint"):
            transaction.set_rollback(True)
            self.savepoint.__exit__(None, None, None)

    @property
    def incident(self) -> Incident:
        return self.world.incident()

    def attempt_to(self, do, **kwargs):
        try:
            return do(**kwargs)
        except (Refused, EvidenceRefused):
            return None

    @rule()
    def look(self) -> None:
        self.digests.append(approval.subject(self.incident)[1])

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps) -> None:
        """Take the next right steps: seal, ask, approve, take the permit, launch with it."""
        for _ in range(steps):
            incident = self.incident
            if incident.state == "open":
                seal(incident.dossier)
                digest = approval.subject(incident)[1]
                asked = self.attempt_to(
                    approval.request_resume, incident=incident, person=self.people["ask"], digest=digest
                )
                if asked is None:
                    self.attempt_to(
                        approval.approve, incident=incident, person=self.people["ada"], digest=digest
                    )
            elif incident.state == "approved":
                self.exchange(off=1, again=False)
            elif incident.state == "resuming" and self.permits:
                self.launch(which=3, reported=True, new=True)

    @precondition(lambda self: hasattr(self, "world") and self.incident.state == "approved")
    @rule()
    def launch_without_taking_the_permit(self) -> None:
        """The directive names the permit: whoever reads it must get nowhere with the name alone."""
        self.launch(which=2, reported=True, new=True)
        assert self.kind == "hold"

    @rule(part=st.sampled_from(["asked", "edited", "waived"]), name=st.sampled_from(["mira", "jonas"]))
    def approve_with_a_part_in_it(self, part, name) -> None:
        """Have a part in the resume, then try to approve it with a fresh digest."""
        if self.incident.state != "open":
            return
        if part == "edited":
            self.change_plan(name, 800)
        elif part == "waived":
            self.waive(name)
        seal(self.incident.dossier)
        self.request(name if part == "asked" else "ask", fresh=True)
        self.approve(name, fresh=True)

    @rule(name=who, fresh=st.booleans())
    def request(self, name, fresh) -> None:
        digest = approval.subject(self.incident)[1] if fresh else self.digests[-1]
        self.attempt_to(
            approval.request_resume, incident=self.incident, person=self.people[name], digest=digest
        )

    @rule(name=who, fresh=st.booleans())
    def approve(self, name, fresh) -> None:
        digest = approval.subject(self.incident)[1] if fresh else self.digests[-1]
        self.attempt_to(approval.approve, incident=self.incident, person=self.people[name], digest=digest)

    @rule(name=who)
    def reject(self, name) -> None:
        self.attempt_to(approval.reject, incident=self.incident, person=self.people[name], why="no")

    @rule(name=who)
    def declare_false_alarm(self, name) -> None:
        self.attempt_to(
            approval.false_alarm, incident=self.incident, person=self.people[name], why="nonsense"
        )

    @rule(name=who, step=st.sampled_from([800, 850, 900, 1000, 7]))
    def change_plan(self, name, step) -> None:
        self.attempt_to(
            actions.change_plan, incident=self.incident, person=self.people[name], checkpoint_step=step
        )

    @rule(name=who)
    def waive(self, name) -> None:
        item = Item.objects.filter(dossier=self.incident.dossier, required=True, waived_at=None).first()
        if item is not None:
            Item.objects.filter(pk=item.pk).update(state="missing", why="gone", sealed_at=None)
            self.attempt_to(waive, item=item, person=self.people[name], why="enough without it")

    @rule()
    def seal_again(self) -> None:
        seal(self.incident.dossier)

    @rule(off=st.integers(0, 2), again=st.booleans())
    def exchange(self, off, again) -> None:
        self.posts += 0 if again else 1
        document = self.attempt_to(
            approval.exchange,
            run=self.world.run,
            incident_id=self.incident.pk,
            attempt=self.newest_attempt + off,
            webhook_id=f"w-{self.posts}",
        )
        if document is not None:
            permit = Permit.objects.get(public_id=document["permit"])
            assert permit.state in ("exchanged", "spent")
            first = self.taken.setdefault(document["permit"], permit.exchanged_by)
            assert first == permit.exchanged_by  # nobody else ever got it
            self.permits.append(document["permit"])

    @property
    def newest_attempt(self) -> int:
        return Attempt.objects.filter(run=self.world.run).latest("number").number

    @rule(which=st.integers(0, 3), reported=st.booleans(), new=st.booleans())
    def launch(self, which, reported, new) -> None:
        """Launch with no permit, a made-up one, one named by a directive, or one that was taken."""
        named = Permit.objects.filter(run=self.world.run).order_by("-id").first()
        permit = ["", str(uuid.uuid4()), str(named.public_id) if named else "", (self.permits or [""])[-1]][
            which
        ]
        before = self.kind
        number = self.newest_attempt + new
        self.world.launch(number, permit if reported else "", reported=reported)
        if before != "continue" and self.kind == "continue":
            used = Permit.objects.get(public_id=permit)
            assert reported
            assert permit in self.permits
            assert used.attempt == number
            assert used.expires_at > timezone.now()
            self.check_approved(used)

    @rule(step=st.sampled_from([990, 1001, 1003]), old=st.booleans())
    def nonfinite(self, step, old) -> None:
        attempt = self.newest_attempt
        self.world.finding(
            "nonfinite",
            step=step,
            attempt=max(1, attempt - old),
            backfill=bool(old and attempt > 1),
            severity="info" if old and attempt > 1 else "halt",
        )

    @rule()
    def progress(self) -> None:
        progress = RunProgress.objects.get(run=self.world.run)
        progress.attempt, progress.step = self.newest_attempt, (progress.step or 0) + 400
        progress.save()

    @rule()
    def permits_expire(self) -> None:
        Permit.objects.filter(run=self.world.run, state="issued").update(expires_at=timezone.now())

    @rule()
    def sweeps(self) -> None:
        before = self.kind
        opening.sweep_findings()
        review.sweep()
        launches.sweep_launches()
        launches.sweep_expired()
        watching.sweep()
        if before != "continue" and self.kind == "continue":
            # Only a launch whose report the receiver missed: its permit was taken and is used now.
            assert Permit.objects.filter(run=self.world.run, launches=1).exists()

    @precondition(lambda self: hasattr(self, "world"))
    @rule(name=who)
    def close(self, name) -> None:
        self.attempt_to(actions.resolve, incident=self.incident, person=self.people[name], why="done")

    @property
    def kind(self) -> str:
        return Directive.objects.filter(run=self.world.run).latest("seq").kind

    def check_approved(self, permit: Permit) -> None:
        request = permit.request
        approvals = list(Approval.objects.filter(request=request))
        assert len(approvals) >= request.approvers_needed
        assert sha256(request.subject) == request.digest == permit.document["approval_digest"]
        for approval_ in approvals:
            assert approval_.digest == request.digest
            assert approval_.approver_id != request.requested_by_id
            edits = permit.incident.plans.filter(made_by=approval_.approver, made_at__lte=approval_.at)
            assert not edits.exists()
            waived = Item.objects.filter(
                dossier=permit.incident.dossier,
                waived_by=str(approval_.approver.opaque_id),
                waived_at__lte=approval_.at,
            )
            assert not waived.exists()
            roles = Membership.objects.get(project=self.world.run.project, person=approval_.approver).roles
            assert Role.APPROVER in roles
        plan = request.subject["plan"]
        assert permit.document["plan"] == plan["kind"]
        assert (permit.document["checkpoint"] or {}).get("step") == (plan["checkpoint"] or {}).get("step")

    @invariant()
    def no_permit_nobody_approved(self) -> None:
        if hasattr(self, "world"):
            for permit in Permit.objects.filter(run=self.world.run):
                self.check_approved(permit)

    @invariant()
    def held_means_held(self) -> None:
        if not hasattr(self, "world"):
            return
        live = Permit.objects.filter(run=self.world.run, state__in=["issued", "exchanged"])
        assert live.count() <= 1
        incident, kind = self.incident, self.kind
        if incident.state in ("open", "approved", "resuming") and incident.holds:
            assert kind != "continue"
        if kind in ("rollback", "resume"):
            assert live.filter(launches=0).exists()
        assert ResumeRequest.objects.filter(incident=incident, state__in=["open", "approved"]).count() <= 1
        assert Incident.objects.filter(run=self.world.run, state__in=Incident.UNRESOLVED).count() <= 1

    @invariant()
    def the_ledger_verifies(self) -> None:
        if hasattr(self, "world"):
            assert ledger.verify(self.world.run) == []


@pytest.mark.django_db
def test_no_sequence_of_calls_resumes_a_held_run_without_its_permit():
    run_state_machine_as_test(
        HeldRun,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
