"""Who is woken, when, over what: until somebody has it, and never twice under another key."""

import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured
from cloudevents.core.formats.json import JSONFormat
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook

from evidence.alarms import alarm
from incidents import actions, approval
from incidents.models import Incident
from incidents.paging import asking, deadman, escalating, on_call, raising, sending
from incidents.paging.ladder import Ladder, Step
from incidents.paging.models import ChannelState, Delivery, Page
from incidents.refused import Refused
from runs.models import RunProgress, Work
from runs.work import Lease, LeaseLost
from tests.paging.conftest import SECRET, STEPS, aged

pytestmark = pytest.mark.django_db


def titles(receiver):
    return [
        got.document["data"]["title"] if "data" in got.document else got.document["title"]
        for got in receiver.got
    ]


def kinds(receiver):
    return [got.document["type"].rpartition(".")[2] for got in receiver.got]


def do():
    """Do all paging work that is due, as any worker would; what keeps evidence is other tests' business."""
    deadman.do_paging_work()


class TestTheLadder:
    """Pure: a ladder, who can be reached, and how long it has waited."""

    @given(
        minutes=st.lists(st.integers(0, 60), min_size=1, max_size=5),
        reached=st.lists(st.booleans(), min_size=5, max_size=5),
        repeat=st.sampled_from([0, 1, 15]),
        looks=st.lists(st.integers(0, 600), min_size=1, max_size=8),
    )
    def test_whoever_can_be_reached_is_and_nobody_twice_in_a_turn(self, minutes, reached, repeat, looks):
        steps = tuple(Step(after, (f"c{n}",)) for n, after in enumerate(sorted(minutes)))
        ladder = Ladder(steps=steps, repeat_min=repeat)
        made = escalating.turns(ladder, lambda name: [name] if reached[int(name[1:])] else [])
        assert [turn.channels[0] for turn in made] == [f"c{n}" for n in range(len(steps)) if reached[n]]
        assert [turn.after for turn in made] == sorted(turn.after for turn in made)
        if made:
            # A step that reaches nobody costs no time.
            assert made[0].after == timedelta(minutes=steps[0].after_min)
        seen: dict[int, timedelta] = {}
        for waited in (timedelta(minutes=minute) for minute in sorted(looks)):
            due, following = escalating.repetition(made, ladder, waited)
            assert following is None or following > waited
            if due is not None:
                assert due.number >= len(steps)
                assert due.after <= waited < due.after + timedelta(minutes=repeat)
                assert seen.setdefault(due.number, due.after) == due.after


class TestAnIncident:
    def test_whoever_is_on_call_is_paged_with_their_own_link(self, world, team, file, phone, hook):
        do()
        (page,) = phone.got
        said = page.document
        assert said["title"] == "pt-13b-web3: Loss spike that did not recover"
        assert "step 1,000" in said["message"]
        assert f"/incidents/{world.incident().pk}\n" in said["message"]
        assert "/acknowledge/" in said["message"]
        assert hook.got == []

    def test_it_escalates_by_the_ladder_and_repeats_until_somebody_has_it(
        self, world, team, file, phone, hook, spare
    ):
        do()
        aged(world.incident(), 6)
        do()
        assert (len(phone.got), len(hook.got), len(spare.got)) == (1, 1, 0)
        assert "Nobody has acknowledged it for 6" in hook.got[0].document["data"]["text"]
        aged(world.incident(), 15)
        do()
        assert len(spare.got) == 1
        aged(world.incident(), 15)
        do()
        assert (len(phone.got), len(hook.got), len(spare.got)) == (1, 1, 2)
        actions.acknowledge(incident=world.incident(), person=team.mira)
        aged(world.incident(), 60)
        do()
        assert kinds(spare) == ["raised", "raised", "acknowledged"]
        assert spare.got[-1].document["data"]["acknowledged_by"] == "mira"
        assert len(phone.got) == 1

    def test_after_a_night_without_workers_only_the_newest_repetition_is_sent(self, world, file, spare):
        do()
        aged(world.incident(), 12 * 60)
        do()
        assert len(spare.got) == 2  # its own step, and one repetition

    def test_follow_on_symptoms_are_quiet(self, world, file, phone, hook):
        do()
        for rank in range(40):
            world.finding("nonfinite_loss", step=1003 + rank, lanes=[rank])
        do()
        assert len(phone.got) == 1
        assert Page.objects.count() == 1

    def test_resolved_is_told_at_once_to_those_who_were_told(self, world, team, file, phone, hook, spare):
        do()
        incident = world.incident()
        aged(incident, 6)
        do()
        approval.false_alarm(incident=world.incident(), person=team.jonas, why="a data test")
        do()
        assert kinds(hook) == ["raised"]  # approved is not over
        approval.exchange(run=world.run, incident_id=incident.pk, attempt=2, webhook_id="msg_1")
        world.launch(2, str(world.permit().public_id))
        assert world.incident().state == "false_alarm"
        do()
        assert titles(phone)[-1].startswith("Over: pt-13b-web3")
        assert kinds(hook) == ["raised", "resolved"]
        assert hook.got[1].document["subject"] == hook.got[0].document["subject"] == f"incident-{incident.pk}"
        assert spare.got == []
        assert Work.objects.exclude(state="done").filter(kind__startswith="incidents.d").count() == 0

    def test_what_is_over_before_it_went_out_wakes_nobody(self, world, team, file, phone):
        phone.status = 500
        do()
        assert len(phone.got) == 1
        actions.acknowledge(incident=world.incident(), person=team.mira)
        phone.status = 200
        aged(world.incident(), 1)
        do()
        assert len(phone.got) == 1
        assert Delivery.objects.get(channel="mira-phone").state == "dropped"

    def test_a_launch_without_a_permit_starts_it_again(self, world, team, file, phone):
        do()
        actions.acknowledge(incident=world.incident(), person=team.mira)
        do()
        world.launch(2)
        do()
        assert len(phone.got) == 2
        assert world.incident().acknowledged_at is None
        said = phone.got[1].document["message"]
        assert "Attempt 2 was launched while the run is held, without a permit." in said
        assert len({one.key for one in Delivery.objects.filter(channel="mira-phone")}) == 2

    def test_what_holds_nothing_is_told_once_and_never_escalates(self, project, file, phone, hook):
        from tests.incidents.world import World

        quiet = World(project, "quiet")
        quiet.finding("skipped_step", rule="nonfinite", severity="warn", step=10)
        incident = Incident.objects.filter(run=quiet.run).first()
        assert incident is not None
        assert not incident.holds
        do()
        aged(incident, 120)
        do()
        assert (len(phone.got), len(hook.got)) == (1, 0)

    def test_nobody_is_paged_without_a_file_and_the_page_waits_for_one(self, world, settings, file, phone):
        settings.PAGING_FILE = ""
        do()
        assert phone.got == []
        settings.PAGING_FILE = str(file.path)
        raising.sweep()
        do()
        assert len(phone.got) == 1


class TestWorkers:
    def test_a_worker_that_ends_before_it_says_so_repeats_the_same_message_under_the_same_key(
        self, world, file, hook
    ):
        file.write('steps = [{after_min = 0, channels = ["ops"]}]')
        raising.look({"incident": world.incident().pk})
        unit = Work.objects.get(kind=escalating.DELIVER)
        # Its lease ran out while the message was on its way: what it would write is refused.
        with pytest.raises(LeaseLost):
            sending.deliver(unit.payload, Lease(unit.pk, uuid.uuid4()))
        assert len(hook.got) == 1
        assert Delivery.objects.get().state == "due"
        Page.objects.update(title="what would be said now", says="is another thing")
        do()
        first, second = hook.got
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert first.body == second.body
        assert Delivery.objects.get().state == "sent"

    def test_a_lost_broker_and_lost_work_lose_no_page(self, world, file, phone):
        Work.objects.all().delete()
        raising.sweep()
        do()
        assert len(phone.got) == 1
        Work.objects.all().delete()
        aged(world.incident(), 6)
        raising.sweep()
        do()
        assert Delivery.objects.get(channel="ops").state == "sent"

    def test_an_acknowledgement_is_looked_at_at_once(self, world, team, file):
        do()
        row = Work.objects.get(kind=asking.KIND)
        assert row.state == "due"
        assert row.not_before > timezone.now() + timedelta(minutes=4)
        actions.acknowledge(incident=world.incident(), person=team.mira)
        row.refresh_from_db()
        assert row.not_before <= timezone.now()


class TestChannels:
    def test_a_channel_that_fails_is_tried_again_and_the_next_is_used_at_once(self, world, file, phone, hook):
        phone.status = 503
        do()
        assert len(phone.got) == 1
        assert len(hook.got) == 1  # five minutes before its step
        state = ChannelState.objects.get(name="mira-phone")
        assert state.failing_since is not None
        assert "503" in state.error
        again = Work.objects.get(kind=escalating.DELIVER, state="due")
        assert timedelta(seconds=3) < again.not_before - timezone.now() <= timedelta(seconds=5)
        phone.status = 200
        Work.objects.filter(pk=again.pk).update(not_before=timezone.now())
        do()
        state.refresh_from_db()
        assert (state.failing_since, state.error) == (None, "")
        aged(world.incident(), 6)
        do()
        assert len(hook.got) == 1  # its own turn was used up

    def test_the_back_off_grows_and_retry_after_is_honoured(self, world, file, hook):
        file.write('steps = [{after_min = 0, channels = ["ops"]}]')
        hook.status, waits = 500, []
        for _ in range(4):
            do()
            row = Work.objects.get(kind=escalating.DELIVER)
            waits.append(round((row.not_before - timezone.now()).total_seconds()))
            Work.objects.filter(pk=row.pk).update(not_before=timezone.now())
        assert waits == [5, 10, 20, 40]
        hook.headers = {"retry-after": "120"}
        do()
        row.refresh_from_db()
        assert round((row.not_before - timezone.now()).total_seconds()) == 120
        assert len({got.headers["webhook-id"] for got in hook.got}) == 1

    def test_a_redirect_is_a_failure_and_is_not_followed(self, world, file, hook, spare):
        file.write('steps = [{after_min = 0, channels = ["ops"]}]')
        hook.status, hook.headers = 307, {"location": spare.url("/stolen")}
        do()
        assert spare.got == []
        assert ChannelState.objects.get(name="ops").error == "answered 307: ok"

    def test_gone_is_gone(self, world, file, hook, spare):
        file.write('steps = [{after_min = 0, channels = ["ops"]}, {after_min = 9, channels = ["spare"]}]')
        hook.status = 410
        do()
        assert Delivery.objects.get(channel="ops").state == "dropped"
        assert len(spare.got) == 1

    def test_our_webhook_reads_with_the_reference_libraries(self, world, file, hook):
        file.write('steps = [{after_min = 0, channels = ["ops"]}]')
        do()
        (got,) = hook.got
        assert Webhook(SECRET).verify(got.body.decode(), got.headers)["subject"]
        event = from_structured(HTTPMessage(got.headers, got.body), JSONFormat())
        incident = world.incident()
        assert event.get_type() == "andon.page.raised"
        assert event.get_id() == got.headers["webhook-id"]
        assert event.get_source() == "http://localhost:8000"
        data: Any = event.get_data()
        assert data["incident"] == str(incident.pk)
        assert data["link"] == f"http://localhost:8000/incidents/{incident.pk}"

    def test_an_address_never_stands_in_an_error(self, world, file, phone):
        secret = "tok-5a1f0c2b9d8e7f6a5b4c"
        file.channels["mira-phone"]["address"] = f"json://user:{secret}@127.0.0.1:1/{secret}"
        file.write(STEPS)
        do()
        assert ChannelState.objects.get(name="mira-phone").error
        assert secret not in ChannelState.objects.get(name="mira-phone").error


class TestApprovals:
    def request(self, world, team):
        incident = world.incident()
        digest = approval.subject(incident)[1]
        return approval.request_resume(incident=incident, person=team.tomas, digest=digest)

    def test_approvers_first_then_everybody_with_the_cost_so_far(self, world, team, file, phone, hook):
        actions.acknowledge(incident=world.incident(), person=team.tomas)
        self.request(world, team)
        do()
        assert titles(phone) == ["pt-13b-web3: approval waiting"]
        assert "tomas asks to resume" in phone.got[0].document["message"]
        assert hook.got == []
        aged(world.incident(), 10.1)
        do()
        assert len(phone.got) == 2
        said = phone.got[1].document["message"]
        assert "Nobody has answered for 10" in said
        assert "GPU‑hours" in said
        assert "so far" in said
        aged(world.incident(), 5)
        do()
        assert titles(hook) == ["pt-13b-web3: approval waiting"]

    def test_the_answer_ends_it_and_a_first_of_two_starts_the_ten_minutes_anew(
        self, world, team, file, phone, hook
    ):
        world.policy(resume={"approvers": 2})
        actions.acknowledge(incident=world.incident(), person=team.tomas)
        request = self.request(world, team)
        do()
        approval.approve(incident=world.incident(), person=team.jonas, digest=request.digest)
        do()
        assert "1 of 2 approved" in phone.got[-1].document["message"]
        aged(world.incident(), 16)
        approval.approve(incident=world.incident(), person=team.priya, digest=request.digest)
        do()
        page = Page.objects.get(kind="approval")
        assert page.ended_at is not None
        assert titles(phone)[-1] == "Over: pt-13b-web3: approval waiting"
        assert page.group == f"incident-{world.incident().pk}"

    def test_break_glass_reaches_every_channel(self, world, team, file, phone, hook, spare):
        actions.acknowledge(incident=world.incident(), person=team.tomas)
        raising.break_glass(world.incident(), team.jonas, "the cluster leaves in five minutes")
        do()
        assert [len(one.got) for one in (phone, hook, spare)] == [1, 1, 1]
        assert "break-glass by jonas" in titles(hook)[0]


class TestOthers:
    def test_a_run_nobody_watches_pages_until_it_is_watched(self, world, team, file, phone):
        actions.acknowledge(incident=world.incident(), person=team.mira)
        RunProgress.objects.filter(run=world.run).update(
            not_watched_since=timezone.now(), not_watched_why="detection failed: KeyError"
        )
        for _ in range(3):
            raising.sweep()
            do()
        assert titles(phone) == ["pt-13b-web3 is not watched"]
        RunProgress.objects.filter(run=world.run).update(not_watched_since=None)
        raising.sweep()
        do()
        assert titles(phone)[-1] == "Over: pt-13b-web3 is not watched"

    def test_a_vault_alarm_pages_once_and_again_after_somebody_took_it(self, world, team, file, phone):
        actions.acknowledge(incident=world.incident(), person=team.mira)
        dossier = world.incident().dossier
        alarm(dossier, "protection lost", "topology: 3 objects were locked, now nothing")
        alarm(dossier, "protection lost", "topology: 3 objects were locked, now nothing")
        do()
        assert len(phone.got) == 1
        assert "3 objects were locked" in phone.got[0].document["message"]
        raising.acknowledge(page=Page.objects.get(kind="vault"), person=team.tomas)
        do()
        alarm(dossier, "protection lost", "norms: 1 object was locked, now nothing")
        do()
        assert len(phone.got) == 2

    def test_what_was_over_and_comes_back_is_raised_anew_also_as_an_alert(
        self, project, settings, file, hook
    ):
        file.channels["am"] = {"kind": "alertmanager", "address": hook.url("/am")}
        file.write('steps = [{after_min = 0, channels = ["am"]}, {after_min = 5, channels = ["spare"]}]')
        about = {"kind": "andon", "title": "Andon may be wrong", "says": "three runs", "link": "/system"}
        for _ in range(2):
            raising.raise_page(key="breaker", **about)
            do()
            raising.end_page("breaker", "the rule observes")
            do()
            do()
        fired = [datetime.fromisoformat(got.document[0]["endsAt"]) > timezone.now() for got in hook.got]
        assert fired == [True, False, True, False]
        assert {got.path for got in hook.got} == {"/am/api/v2/alerts"}
        assert len({str(got.document[0]["labels"]) for got in hook.got}) == 1

    def test_of_the_second_end_hears_only_who_heard_the_second_beginning(self, project, file, hook, spare):
        file.write('steps = [{after_min = 0, channels = ["ops"]}, {after_min = 5, channels = ["spare"]}]')
        about = {"kind": "andon", "title": "Andon may be wrong", "says": "three runs", "link": "/system"}
        page = raising.raise_page(key="breaker", **about)
        do()
        Page.objects.filter(pk=page.pk).update(escalating_since=timezone.now() - timedelta(minutes=6))
        asking.ask_page("breaker")
        do()
        raising.end_page("breaker", "the rule observes")
        do()
        raising.raise_page(key="breaker", **about)
        do()
        raising.end_page("breaker", "the rule observes")
        do()
        assert kinds(spare) == ["raised", "resolved"]
        assert kinds(hook) == ["raised", "resolved", "raised", "resolved"]
        assert len({got.headers["webhook-id"] for got in hook.got}) == 4

    def test_an_alarm_of_the_whole_store_is_any_responder_s(self, world, team, file, phone, hook):
        file.write('steps = [{after_min = 0, channels = ["ops"]}]')
        actions.acknowledge(incident=world.incident(), person=team.mira)
        alarm(None, "store does not lock", "the bucket lets go of what it locks")
        do()
        assert titles(hook) == ["Vault: store does not lock"]
        page = Page.objects.get(kind="vault")
        for person in (team.vera, team.charlie):
            with pytest.raises(Refused):
                raising.acknowledge(page=page, person=person)
        raising.acknowledge(page=page, person=team.tomas)
        do()
        assert kinds(hook) == ["raised", "acknowledged"]

    def test_somebody_is_paged_by_name(self, world, team, file, phone):
        actions.acknowledge(incident=world.incident(), person=team.tomas)
        raising.page_person(incident=world.incident(), person=team.tomas, who="mira", why="look at layer 6")
        do()
        assert titles(phone) == ["pt-13b-web3: tomas asks for you"]
        assert "look at layer 6" in phone.got[0].document["message"]


def test_the_pager_taken_by_hand_goes_before_the_list(world, team, file, phone, project):
    assert on_call.of_project(project).name == "mira"
    on_call.take(
        project=project, person=team.jonas, who=team.jonas, until=timezone.now() + timedelta(hours=1)
    )
    holder = on_call.of_project(project)
    assert (holder.name, holder.following) == ("jonas", "mira")
    do()
    # jonas has no channel in the file: the next step starts in the place of his.
    assert phone.got == []
    assert Delivery.objects.get().channel == "ops"
