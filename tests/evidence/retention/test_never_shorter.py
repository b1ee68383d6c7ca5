"""Whatever several people do in whatever order: nothing shortens, releases or deletes before its time."""

import itertools
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from andon.policy import EvidenceRule, Policy
from evidence.gates import may_delete
from evidence.models import Dossier, Item, StoredObject, VaultRequest
from evidence.refused import Refused
from evidence.retention.dates import close_dossier, extend_retention, renew_open
from evidence.retention.release import (
    approve_deletion,
    approve_release,
    decline,
    request_deletion,
    request_release,
)
from evidence.vault import VaultError, vault
from runs.models import Membership, Person, Project, Role
from runs.work import run_due
from tests.evidence import world
from tests.evidence.conftest import Clock

pytestmark = pytest.mark.django_db(transaction=True)
_NUMBERS = itertools.count()
_WHO = st.sampled_from(["alice", "bob", "dana", "charlie"])


class Vault(RuleBasedStateMachine):
    """One checkpoint on disk that up to a few dossiers hold, and four people; charlie may do nothing."""

    root: Path
    clock: Clock
    people: dict[str, Person]
    dossiers = Bundle("dossiers")
    requests = Bundle("requests")

    @initialize()
    def begin(self) -> None:
        number = next(_NUMBERS)
        self.run_row = world.make_run(f"run-{number}")
        self.checkpoint = world.on_disk(self.run_row, self.root / str(number), 900)
        self.seen: dict[int, datetime] = {}  # item → the latest date it was ever promised
        self.opened: list[int] = []

    def attempt(self, act: Any, **given: Any) -> Any:
        try:
            return act(**given)
        except Refused:
            return None

    @rule(target=dossiers, days=st.sampled_from([1, 5, 30]))
    def open(self, days: int) -> Dossier:
        rules = Policy(evidence=(EvidenceRule("last_good_checkpoint", retain_days=days),))
        dossier = world.open_dossier(self.run_row, rules=rules)
        Dossier.objects.filter(pk=dossier.pk).update(url="")
        world.work(dossier, rounds=2)
        self.opened.append(dossier.pk)
        return dossier

    @rule(dossier=dossiers, who=_WHO)
    def close(self, dossier: Dossier, who: str) -> None:
        self.attempt(close_dossier, dossier=dossier, person=self.people[who], why="looked at")

    @rule(dossier=dossiers, who=_WHO, days=st.integers(-40, 40))
    def extend(self, dossier: Dossier, who: str, days: int) -> None:
        until = timezone.now() + timedelta(days=days)
        self.attempt(extend_retention, dossier=dossier, person=self.people[who], until=until, why="audit")

    @rule(days=st.sampled_from([0.5, 3, 15, 31]))
    def wait(self, days: float) -> None:
        self.clock.pass_days(days)

    @rule()
    def sweep(self) -> None:
        renew_open()
        run_due()

    @rule(
        target=requests, dossier=dossiers, who=_WHO, what=st.sampled_from([request_release, request_deletion])
    )
    def ask(self, dossier: Dossier, who: str, what: Any) -> VaultRequest | None:
        made: VaultRequest | None = self.attempt(what, dossier=dossier, person=self.people[who], why="space")
        return made

    @rule(request=requests, who=_WHO, what=st.sampled_from([approve_release, approve_deletion]))
    def agree(self, request: VaultRequest | None, who: str, what: Any) -> None:
        if request is None:
            return
        agreed = self.attempt(what, request=request, person=self.people[who])
        run_due()
        if agreed is not None:
            assert who != "charlie"
            assert agreed.requested_by != agreed.decided_by == str(self.people[who].opaque_id)
            latest = max(self.seen[pk] for pk in self._items(agreed.dossier))
            assert agreed.decided_at >= latest, "agreed to before the last date that was ever promised"

    @rule(dossier=dossiers, patience=st.sampled_from([0, 31]))
    def go_all_the_way(self, dossier: Dossier, patience: int) -> None:
        """What random steps seldom do: close, wait, release, delete."""
        self.close(dossier, "bob")
        self.wait(patience)
        self.agree(self.ask(dossier, "bob", request_release), "dana", approve_release)
        self.agree(self.ask(dossier, "alice", request_deletion), "bob", approve_deletion)

    @rule(request=consumes(requests), who=_WHO)
    def refuse(self, request: VaultRequest | None, who: str) -> None:
        if request is not None:
            self.attempt(decline, request=request, person=self.people[who], why="no")

    def _items(self, dossier: Dossier) -> list[int]:
        return list(Item.objects.filter(dossier=dossier).values_list("pk", flat=True))

    def _agreed(self, dossier_id: int, kind: str) -> bool:
        return VaultRequest.objects.filter(
            dossier=dossier_id, kind=kind, state__in=["approved", "done"]
        ).exists()

    @invariant()
    def no_date_moves_earlier(self) -> None:
        for item in Item.objects.filter(dossier__in=getattr(self, "opened", [])):
            assert item.retain_until is not None
            assert item.retain_until >= self.seen.get(item.pk, item.retain_until)
            self.seen[item.pk] = item.retain_until

    @invariant()
    def what_anyone_counts_on_is_held(self) -> None:
        unreleased = [pk for pk in getattr(self, "opened", []) if not self._agreed(pk, "release")]
        if not unreleased:
            return
        assert not may_delete(run=self.run_row, uris=[self.checkpoint.uri])[0]["allow"]
        for item in Item.objects.filter(dossier__in=unreleased):
            assert Path(item.protected_by["tree"]).is_dir()

    @invariant()
    def bytes_go_only_after_two_pairs_agreed(self) -> None:
        for one in StoredObject.objects.filter(item__dossier__in=getattr(self, "opened", [])).select_related(
            "item"
        ):
            dossier_id = one.item.dossier_id
            if self._agreed(dossier_id, "deletion"):
                assert self._agreed(dossier_id, "release")
                continue
            try:
                vault().open(one.key, one.version_id).close()
            except VaultError as error:
                raise AssertionError(f"{one.path} is gone and nobody agreed") from error


def test_nothing_shortens_releases_or_deletes_before_its_time(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person, charlie: Person
) -> None:
    dana = Person.objects.create_user("dana", "dana@example.org", "dana-password")
    Membership.objects.create(
        project=Project.objects.get(slug="default"), person=dana, roles=[Role.VAULT_OFFICER]
    )
    Vault.root, Vault.clock = sources, clock
    Vault.people = {"alice": alice, "bob": bob, "charlie": charlie, "dana": dana}
    run_state_machine_as_test(
        Vault,
        settings=settings(
            max_examples=12,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Sequences that get all the way were among them, or nothing above was tried.
    assert VaultRequest.objects.filter(kind="deletion", state="done").exists()
