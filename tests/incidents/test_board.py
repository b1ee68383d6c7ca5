"""The diagnosis board of a real incident: rows in, what people do, and who may."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from incidents import board, diagnosing
from incidents.models import BoardChange, Incident, Probe
from incidents.refused import Refused
from runs.models import Attempt, Event, FirstBad
from tests.incidents.world import World

pytestmark = pytest.mark.django_db

DATA, HARDWARE, NETWORK = "data", "hardware", "communication"


def event(world, kind, *, step=None, rank=None, node="", after_s=0.0, **data):
    at = timezone.now() + timedelta(seconds=after_s)
    return Event.objects.create(
        received_at=at,
        run_id=world.run.pk,
        attempt=1,
        type=kind,
        step=step,
        rank=rank,
        node=node,
        occurred_at=at,
        data=data,
        webhook_id=f"board-{kind}-{step}-{rank}-{after_s}",
    )


@pytest.fixture
def broken(project):
    """Rank 3 (node-01) went nonfinite by itself at step 1002; steps, batches and a launch are known."""
    world = World(project)
    Attempt.objects.filter(run=world.run).update(first_step=1, data={"revision": "a41f9c2"})
    for step in (800, 900):
        world.checkpoint(step)
    world.steps(998, 1002)
    for step in (1000, 1001, 1002):
        event(world, "batch.seen", step=step, rank=3, lengths=[2048, 9000 if step == 1002 else 2000])
    FirstBad.objects.create(
        run=world.run, attempt=1, stream="rank", lane="3", step=1002, phase=2, view="local", bits=4,
        received_at=timezone.now(),
    )  # fmt: skip
    world.finding("nonfinite", step=1002, lanes=[3], view="local", series="nonfinite")
    return world


def carries(view, family):
    return next(row for row in view.rows if row.family == family).carries


class TestWhatIsGathered:
    def test_every_line_carries_the_row_it_came_from(self, broken):
        view = board.of(broken.incident())
        finding = broken.run.findings.get()
        data = view.row(DATA)
        assert data.standing == "leading"
        assert data.supports[0].id.startswith("V-")
        overlong = Event.objects.get(pk=int(data.supports[0].id.removeprefix("V-")))
        assert (overlong.step, overlong.rank) == (1002, 3)
        assert f"F-{finding.pk}" in {line.id for line in data.supports}
        assert view.row(NETWORK).standing == "unlikely"
        assert "N-1" in {line.id for line in view.row("code/config drift").contradicts}

    def test_a_device_fault_on_the_node_that_was_first_takes_the_lead(self, broken):
        event(broken, "hardware.xid", node="node-01", xid=79, gpu=1)
        view = board.of(broken.incident())
        assert view.leading.family == HARDWARE
        assert view.opened_as == DATA  # what the incident was named for when it opened
        assert "Xid 79" in view.row(HARDWARE).supports[0].text

    def test_an_application_fault_does_not(self, broken):
        event(broken, "hardware.xid", node="node-01", xid=31, gpu=1)
        assert board.of(broken.incident()).leading.family == DATA

    def test_an_earlier_incident_on_the_same_node_speaks(self, broken, project):
        first = broken.incident()
        Incident.objects.filter(pk=first.pk).update(
            state="resolved", resolved_at=timezone.now(), traits={"nodes": ["node-01"]}
        )
        other = World(project, slug="other")
        other.finding("nonfinite", step=7, lanes=[3], view="local", series="nonfinite")
        Incident.objects.filter(pk=other.incident().pk).update(
            first_bad={**other.incident().first_bad, "step": 7, "ranks": [3]}
        )
        FirstBad.objects.create(
            run=other.run, attempt=1, stream="rank", lane="3", step=7, phase=2, view="local", bits=4,
            received_at=timezone.now(),
        )  # fmt: skip
        lines = board.of(other.incident()).row(HARDWARE).supports
        assert any(line.id == f"I-{first.pk}" and "node-01" in line.text for line in lines)

    def test_a_run_held_by_hand_has_a_board_that_claims_nothing(self, world, team, project):
        quiet = World(project, slug="quiet")
        from incidents.actions import hold_by_hand

        made = hold_by_hand(run=quiet.run, person=team.tomas, why="looks odd")
        view = board.of(made)
        assert view.leading is None
        assert {row.standing for row in view.rows} <= {"open", "unlikely"}

    def test_it_asks_a_bounded_number_of_questions(self, broken, django_assert_max_num_queries):
        for step in range(300):
            event(broken, "hardware.xid", node="node-00", after_s=step, xid=119)
        incident = broken.incident()
        with django_assert_max_num_queries(14):
            view = board.of(incident)
        assert any(line.more == 299 for line in view.row(HARDWARE).supports)

    def test_of_many_dumps_the_end_tells_who_never_entered(self, project):
        world = World(project, world_size=100)
        world.finding("hang", severity="warn", step=None, series="", rule="hang", numbers={})
        entry = {"process_group": ["0", "default"], "profiling_name": "nccl:all_reduce", "state": "started"}
        for rank in range(99):
            entries = [{**entry, "collective_seq_id": number} for number in range(1, 9)]
            event(world, "flight_recorder.dump", rank=rank, entries=entries)
        line = board.of(world.incident()).row(HARDWARE).supports[0]
        assert line.text == "ranks 0-98 wait in nccl:all_reduce 8, rank 99 never entered it"


class TestPeople:
    def test_only_a_responder_changes_the_board(self, broken, team):
        incident = broken.incident()
        for act in (
            lambda person: diagnosing.take(incident=incident, person=person, family=DATA),
            lambda person: diagnosing.start(incident=incident, person=person, family=DATA, key="read_batch"),
            lambda person: diagnosing.close_cause(
                incident=incident, person=person, certainty="unknown", ids=[], why="no idea"
            ),
        ):
            for person in (team.vera, team.charlie):
                with pytest.raises(Refused, match="Only a responder"):
                    act(person)
        assert not BoardChange.objects.exists()

    def test_a_family_has_one_owner_and_taking_it_over_is_said(self, broken, team):
        incident = broken.incident()
        diagnosing.take(incident=incident, person=team.tomas, family=DATA)
        diagnosing.take(incident=incident, person=team.mira, family=DATA)
        view = board.of(incident, person=team.mira)
        assert (view.row(DATA).owner, view.row(DATA).mine) == ("mira", True)
        assert "took data from tomas" in view.history[0].text
        with pytest.raises(Refused, match="mira has it"):
            diagnosing.release(incident=incident, person=team.tomas, family=DATA)
        diagnosing.release(incident=incident, person=team.mira, family=DATA)
        assert board.of(incident).row(DATA).owner == ""
        assert incident.timeline.filter(kind="diagnosis").count() == 3

    def test_a_second_probe_asks_to_stop_the_first(self, broken, team):
        incident = broken.incident()
        first = diagnosing.start(incident=incident, person=team.tomas, family=DATA, key="read_batch")
        with pytest.raises(Refused, match="H-1 “Read the batch") as refused:
            diagnosing.start(incident=incident, person=team.mira, family=HARDWARE, key="swap_node")
        assert refused.value.code == "probe-running"
        second = diagnosing.start(
            incident=incident, person=team.mira, family=HARDWARE, key="swap_node", instead_of=first.number
        )
        first.refresh_from_db()
        assert (first.state, second.state, second.number) == ("stopped", "running", 2)
        # Somebody who saw the first one running does not stop the second by that.
        with pytest.raises(Refused, match="H-2"):
            diagnosing.start(
                incident=incident, person=team.tomas, family=DATA, key="other_batch", instead_of=1
            )

    def test_the_database_keeps_two_probes_from_running_at_once(self, broken, team):
        incident = broken.incident()
        diagnosing.start(incident=incident, person=team.tomas, family=DATA, key="read_batch")
        twin = {"family": DATA, "key": "fp32", "name": "x", "owner": team.mira, "started_at": timezone.now()}
        with pytest.raises(IntegrityError, match="one_running_probe"), transaction.atomic():
            Probe.objects.create(incident=incident, number=2, **twin)

    def test_a_result_rules_a_family_out_and_a_later_one_brings_it_back(self, broken, team):
        incident = broken.incident()
        probe = diagnosing.start(incident=incident, person=team.tomas, family=DATA, key="other_batch")
        assert "export_bag" in probe.command
        with pytest.raises(Refused, match="Choose how it came out"):
            diagnosing.record(incident=incident, person=team.tomas, number=1, result="fine")
        diagnosing.record(incident=incident, person=team.mira, number=1, result="breaks", note="seed 7")
        row = board.of(incident).row(DATA)
        assert (row.standing, row.by) == ("ruled out", "H-1")
        assert (row.probes[0].owner, row.probes[0].recorded_by) == ("tomas", "mira")
        assert row.probes[0].note == "seed 7"
        with pytest.raises(Refused, match="done already"):
            diagnosing.record(incident=incident, person=team.mira, number=1, result="clean")
        diagnosing.start(incident=incident, person=team.tomas, family=DATA, key="batch_alone")
        diagnosing.record(incident=incident, person=team.tomas, number=2, result="breaks")
        assert board.of(incident).leading.family == DATA

    def test_a_probe_of_ones_own_needs_a_name_and_its_one_condition(self, broken, team):
        incident = broken.incident()
        with pytest.raises(Refused, match="one condition"):
            diagnosing.start(incident=incident, person=team.tomas, family=DATA, key="own", name="try")
        own = {"key": "own", "name": "drop sample 7", "condition": "sample 7"}
        diagnosing.start(incident=incident, person=team.tomas, family=DATA, **own)
        diagnosing.record(incident=incident, person=team.tomas, number=1, result="supports")
        assert board.of(incident).row(DATA).by == "H-1"

    def test_a_cause_is_carried_by_lines_of_its_family(self, broken, team):
        incident = broken.incident()
        good = carries(board.of(incident), DATA)

        def close(certainty, ids, family=DATA, why="one overlong sample"):
            diagnosing.close_cause(
                incident=incident, person=team.mira, certainty=certainty, family=family, ids=ids, why=why
            )

        with pytest.raises(Refused, match="none was chosen"):
            close("known", [])
        with pytest.raises(Refused, match="F-0"):
            close("probable", [good[0], "F-0"])
        with pytest.raises(Refused, match="own words"):
            close("known", good[:1], why=" ")
        close("probable", good[:1])
        cause = board.of(incident).cause
        assert (cause.certainty, cause.family, cause.ids, cause.by) == ("probable", DATA, good[:1], "mira")
        # A cause may be opened again, and unknown is an ordinary end.
        close("open", [], why="it came back")
        assert board.of(incident).cause is None
        close("unknown", ["F-1"], family="", why="replays were clean")
        cause = board.of(incident).cause
        assert (cause.certainty, cause.family, cause.ids) == ("unknown", "", [])
        assert [line.kind for line in board.of(incident).history] == ["cause"] * 3

    def test_a_family_that_was_ruled_out_is_no_cause(self, broken, team):
        incident = broken.incident()
        diagnosing.start(incident=incident, person=team.tomas, family=HARDWARE, key="swap_node")
        diagnosing.record(incident=incident, person=team.tomas, number=1, result="breaks")
        said = {"certainty": "known", "family": HARDWARE, "ids": ["H-1"], "why": "it is"}
        with pytest.raises(Refused, match="H-1 ruled hardware out"):
            diagnosing.close_cause(incident=incident, person=team.mira, **said)

    def test_history_can_only_be_added_to(self, broken, team):
        diagnosing.take(incident=broken.incident(), person=team.tomas, family=DATA)
        with pytest.raises(Exception, match="append-only"), transaction.atomic():
            BoardChange.objects.update(text="somebody else did")
