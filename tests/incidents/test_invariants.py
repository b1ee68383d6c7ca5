"""No sequence of calls resumes a held run without a valid permit, or yields one nobody approved."""

import uuid
from datetime import timedelta

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

from andon.canonical import sha256
from evidence.actions import waive
from evidence.models import Item
from evidence.refused import Refused as EvidenceRefused
from incidents import actions, alone, approval, launches, ledger, opening, review, watching
from incidents.models import Approval, Incident, Permit, ResumeRequest
from incidents.refused import Refused
from incidents.standing_approvals import actions as standing
from incidents.standing_approvals.models import StandingApproval
from runs.models import Attempt, Directive, Membership, Person, Project, Role, RunProgress
from tests.incidents.world import World, seal

PEOPLE = {
    "tomas": [Role.RESPONDER],
    "mira": [Role.RESPONDER, Role.APPROVER],
    "jonas": [Role.APPROVER],
    "vera": [Role.VIEWER],
    "root": [Role.ADMIN],  # may break the glass, may not approve
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
        self.world.stop()
        seal(self.incident.dossier)
        self.standing: list[StandingApproval] = []
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
                self.world.stop(attempt=self.newest_attempt)
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

    @rule(name=who, fresh=st.booleans(), typed=st.booleans())
    def break_the_glass(self, name, fresh, typed) -> None:
        incident = self.incident
        digest = approval.subject(incident, kind="break_glass")[1] if fresh else self.digests[-1]
        made = self.attempt_to(
            approval.break_glass,
            incident=incident,
            person=self.people[name],
            why="the cluster leaves",
            run_name=self.world.run.slug if typed else "another",
            digest=digest,
        )
        if made is not None:
            assert name == "root"
            assert fresh
            assert typed

    @rule(approvers=st.sampled_from([1, 2]), alone=st.booleans())
    def policy_changes(self, approvers, alone) -> None:
        """Two approvers, or one alone on duty: a live approval of the policy before is void."""
        self.world.policy(resume={"approvers": approvers, "solo": alone, "solo_delay_s": 600.0})

    @rule(name=who, fresh=st.booleans())
    def resume_as_sole_approver(self, name, fresh) -> None:
        incident = self.incident
        digest = approval.subject(incident, kind="solo")[1] if fresh else self.digests[-1]
        self.attempt_to(approval.solo, incident=incident, person=self.people[name], digest=digest)

    @rule(name=who)
    def be_alone_on_duty(self, name) -> None:
        """Everybody but one approver is away, and the plan is one that one person may approve."""
        for other in {"mira", "jonas", "ada"} - {name}:
            Person.objects.filter(pk=self.people[other].pk).update(is_active=False)
        self.attempt_to(
            actions.change_plan,
            incident=self.incident,
            person=self.people["tomas"],
            kind="rollback_and_replay",
            checkpoint_step=850,
            why="the link was bad",
        )
        self.resume_as_sole_approver(name, True)

    @rule()
    def everybody_is_back(self) -> None:
        Person.objects.filter(pk__in=[one.pk for one in self.people.values()]).update(is_active=True)

    @rule(minutes=st.sampled_from([1, 11]))
    def time_to_veto_passes(self, minutes) -> None:
        for request in ResumeRequest.objects.filter(incident=self.incident, grants_at__isnull=False):
            request.grants_at -= timedelta(minutes=minutes)
            request.save(update_fields=["grants_at"])
        alone.sweep_solo()

    @rule(
        writer=who,
        signer=who,
        per_day=st.sampled_from([0, 1, 2]),
        steps=st.sampled_from([10, 500]),
        samples=st.sampled_from([0, 10_000]),
    )
    def sign_in_advance(self, writer, signer, per_day, steps, samples) -> None:
        made = self.attempt_to(
            standing.create,
            project=self.world.run.project,
            person=self.people[writer],
            kinds=["loss_spike", "crash"],
            per_day=per_day,
            furthest_steps=steps,
            widest_skip=samples,
            expires_at=timezone.now() + timedelta(days=1),
            why="nights",
        )
        if made is None:
            return
        self.standing.append(made)
        signed = self.attempt_to(standing.sign, standing=made, person=self.people[signer], digest=made.digest)
        assert signed is None or writer != signer

    @precondition(lambda self: hasattr(self, "standing") and self.standing)
    @rule(name=who)
    def revoke(self, name) -> None:
        self.attempt_to(
            standing.revoke, standing=self.standing[-1], person=self.people[name], why="no longer"
        )

    @rule()
    def review_under_a_standing_approval(self) -> None:
        """What was signed in advance may carry a spike through by itself, and nothing else."""
        before = set(Permit.objects.values_list("pk", flat=True))
        review.again(self.incident.pk)
        for permit in Permit.objects.exclude(pk__in=before):
            assert permit.request.kind == "standing"
            assert permit.incident.kind == "loss_spike"

    @rule(stopped=st.booleans())
    def ranks_answer(self, stopped) -> None:
        self.world.stop(attempt=self.newest_attempt, state="held" if stopped else "refused")

    @rule(infrastructure=st.booleans())
    def the_attempt_exits(self, infrastructure) -> None:
        said = {"attributed_to": "node_loss"} if infrastructure else {"exit_code": 1}
        Attempt.objects.filter(run=self.world.run, number=self.newest_attempt).update(
            exited_at=timezone.now(), exit=said
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
            supervisor=("", "slurm-a", "slurm-b")[self.posts % 3],
        )
        if document is not None:
            permit = Permit.objects.get(public_id=document["permit"])
            assert permit.state in ("exchanged", "spent")
            first = self.taken.setdefault(document["permit"], permit.supervisor)
            assert first == permit.supervisor  # nobody else ever got it
            assert len(permit.exchanges) <= 3
            assert first or len(permit.exchanges) == 1
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
        for permit_ in Permit.objects.filter(run=self.world.run):
            assert permit_.launches <= len(permit_.exchanges) <= 3

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
        alone.sweep_solo()
        if before != "continue" and self.kind == "continue":
            # Only a launch whose report the receiver missed: its permit was taken and is used now.
            assert Permit.objects.filter(run=self.world.run, launches__gte=1).exists()

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
        if request.kind == "standing":
            self.check_signed_in_advance(permit)
        else:
            assert approvals
        for approval_ in approvals:
            assert approval_.digest == request.digest
            if request.kind == "break_glass":
                named = Membership.objects.get(project=self.world.run.project, person=approval_.approver)
                assert Role.ADMIN in named.roles
                continue
            if request.kind == "solo":
                assert request.grants_at <= permit.issued_at
                assert request.plan.kind in ("resume_in_place", "rollback_and_replay")
            else:
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

    def check_signed_in_advance(self, permit: Permit) -> None:
        """Somebody signed exactly this much, and it is within it."""
        one, plan = permit.request.standing, permit.request.plan
        assert one.signed_at is not None
        assert one.signed_by_id != one.made_by_id
        assert one.signed_at <= permit.issued_at < one.expires_at
        assert one.revoked_at is None or permit.issued_at <= one.revoked_at
        assert plan.made_by_id is None
        assert plan.numbers["steps_lost"] <= one.furthest_steps
        skipped = plan.skip["to"] - plan.skip["from"] if plan.skip else 0
        assert skipped <= one.widest_skip
        assert Permit.objects.filter(request__standing=one).count() <= one.per_day
        assert permit.document["approval"] == f"standing-{one.pk}"

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
            max_examples=14,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
