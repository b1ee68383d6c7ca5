"""Any night: whatever people, trainers, channels and workers do, and in whatever order."""

from dataclasses import dataclass, field

import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from incidents import actions, states
from incidents.models import Incident
from incidents.paging import deadman, raising
from incidents.paging.models import Delivery, Page
from incidents.refused import Refused
from runs.models import Person, Work
from tests.incidents.world import Role, World, held, person
from tests.paging.conftest import aged
from tests.paging.receivers import Receiver


@dataclass
class Night:
    """One held run, two receivers, and what must hold after every move."""

    world: World
    mira: Person
    ends: dict[str, Receiver]
    launches: int = 1
    over: bool = False
    seen: dict[str, bytes] = field(default_factory=dict)

    def move(self, name: str) -> None:
        before = {channel: len(end.got) for channel, end in self.ends.items()}
        quiet = self.over or self.world.incident().acknowledged_at is not None
        anew = getattr(self, name)()
        deadman.do_paging_work()
        self._check(before, quiet and not anew)

    def _check(self, before: dict[str, int], quiet: bool) -> None:
        page = Page.objects.get(kind="incident")
        for channel, end in self.ends.items():
            for got in end.got:
                body = self.seen.setdefault(got.headers["webhook-id"], got.body)
                assert body == got.body, "the same key with other words"
            new = [got.document["type"] for got in end.got[before[channel] :]]
            if quiet:
                assert "andon.page.raised" not in new, "somebody was woken for what somebody has"
        works = any(end.status == 200 for end in self.ends.values())
        if works and page.acknowledged_at is None and page.ended_at is None:
            sent = page.deliveries.filter(what="raised", round=page.round, state="sent")
            assert sent.exists(), "nobody was told, though a channel works"
        if self.over:
            assert page.ended_at is not None
            assert not Delivery.objects.filter(what="raised", state="due").exists()
            for channel, end in self.ends.items():
                told = page.deliveries.filter(what="raised", channel=channel, state="sent").exists()
                resolved = page.deliveries.filter(what="resolved", channel=channel)
                assert resolved.count() == int(told)
                if end.status == 200 and told:
                    assert resolved.get().state == "sent"

    # moves; True: the page is raised anew by it

    def five_minutes(self) -> bool:
        aged(self.world.incident(), 5)
        return False

    def an_hour(self) -> bool:
        aged(self.world.incident(), 60)
        return False

    def acknowledge(self) -> bool:
        try:
            actions.acknowledge(incident=self.world.incident(), person=self.mira)
        except Refused:
            assert self.over or self.world.incident().acknowledged_at is not None
        return False

    def launch_without_permit(self) -> bool:
        self.launches += 1
        if not self.over:
            self.world.launch(self.launches)
        return not self.over

    def more_ranks_fail(self) -> bool:
        if not self.over:
            self.world.finding("nonfinite_loss", step=1002, lanes=[self.launches])
        return False

    def first_fails(self) -> bool:
        self.ends["first"].status = 503
        return False

    def second_fails(self) -> bool:
        self.ends["second"].status = 500
        return False

    def both_work(self) -> bool:
        for end in self.ends.values():
            end.status = 200
        Work.objects.update(not_before=self.world.run.created_at)  # no back-off: what is due is tried now
        return False

    def the_broker_and_all_work_are_lost(self) -> bool:
        Work.objects.all().delete()
        raising.sweep()
        for pk in Delivery.objects.filter(state="due").values_list("pk", flat=True):
            assert Work.objects.filter(key=str(pk)).exists(), "a message that nobody will send"
        return False

    def resolve(self) -> bool:
        incident = self.world.incident()
        if incident.state == Incident.State.OPEN:
            states.move(incident, Incident.State.RESOLVED, why="clean")
            self.over = True
        return False


MOVES = [name for name, value in vars(Night).items() if callable(value) and name[0] != "_" and name != "move"]
FILE = """
steps = [{after_min = 0, channels = ["first"]}, {after_min = 10, channels = ["second"]}]
[channels.first]
kind = "webhook"
address = "%s"
secret = "%s"
[channels.second]
kind = "webhook"
address = "%s"
secret = "%s"
"""


@pytest.mark.django_db
@settings(
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],  # a night is short enough to be read as it is
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(moves=st.lists(st.sampled_from(MOVES), min_size=3, max_size=12))
def test_somebody_is_told_until_somebody_has_it_and_nobody_else(project, file, hook, spare, moves):
    secret = file.channels["ops"]["secret"]
    file.path.write_text(FILE % (hook.url("/1"), secret, spare.url("/2"), secret))
    hook.got.clear()
    spare.got.clear()
    hook.status = spare.status = 200
    with transaction.atomic():
        night = Night(
            held(project), person(project, "mira", Role.RESPONDER), {"first": hook, "second": spare}
        )
        deadman.do_paging_work()
        for name in moves:
            night.move(name)
        transaction.set_rollback(True)
