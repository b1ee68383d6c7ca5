"""What opens an incident, what joins it, and what only is shown."""

import threading

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from evidence.models import Hold
from incidents import actions, opening, plans, review, watching
from incidents.models import Incident, LedgerRow, TimelineEntry
from incidents.refused import Refused
from runs.directives import current, current_document, set_directive
from runs.locks import lock_run
from runs.models import Finding, FirstBad, Work
from tests.incidents.world import World


@pytest.fixture
def quiet(project):
    """A run that is not held: checkpoints and steps, nothing bad."""
    world = World(project)
    for step in (800, 900, 1000):
        world.checkpoint(step)
    world.steps(995, 1000)
    return world


def bad_rank(world, rank: int, step: int, *, phase: int = 2, attempt: int = 1) -> None:
    FirstBad.objects.create(
        run=world.run,
        attempt=attempt,
        stream="rank",
        lane=str(rank),
        rank=-1,
        step=step,
        phase=phase,
        view="local",
        bits=4,
        received_at=timezone.now(),
    )


@pytest.mark.django_db
class TestNonfinite:
    def test_it_holds_freezes_and_names_rank_and_step(self, quiet):
        bad_rank(quiet, 3, 1001)
        quiet.finding("nonfinite", step=1001, lanes=[3], view="local", numbers={"grad_norm": "nan"})
        incident = quiet.incident()
        assert incident.title == "NaN on one rank"
        assert incident.first_bad["ranks"] == [3]
        assert incident.first_bad["step"] == 1001
        assert incident.first_bad["phase"] == "backward"
        assert incident.symptom == "one_rank_nonfinite"
        assert incident.family == "data"
        assert current_document(quiet.run.pk)["incident"] == str(incident.pk)

    def test_the_deletion_gate_protects_at_once(self, quiet):
        quiet.finding("nonfinite", step=1001)
        held = Hold.objects.filter(dossier=quiet.incident().dossier).values_list("uri", flat=True)
        assert any("step-1000" in uri for uri in held)

    def test_the_hold_is_a_ledger_row_with_positions_and_numbers(self, quiet):
        quiet.steps(1001, 1001)
        quiet.finding("nonfinite", step=1001)
        row = LedgerRow.objects.get(run=quiet.run)
        assert (row.action, row.step, row.ranks) == ("hold", 1001, [0, 1, 2, 3])
        assert row.before["loader_position"] == 1000 * 32
        assert row.after["loader_position"] == 1001 * 32
        assert row.detector["numbers"] == {"loss": "nan"}
        assert row.none_because["checkpoint"] == "none: a hold loads nothing"
        assert row.budget == {"used": 1, "of": 6}

    def test_only_the_first_bad_batch_is_accused_when_all_later_steps_are_bad_too(self, quiet):
        quiet.steps(1001, 1010)
        for step in range(1001, 1011):
            quiet.finding("nonfinite", step=step)
        review.again(quiet.incident().pk)
        assert plans.newest(quiet.incident()).numbers["last_bad_step"] == 1001

    def test_the_title_tells_when_all_ranks_followed(self, quiet):
        bad_rank(quiet, 3, 1001)
        quiet.finding("nonfinite", step=1001, lanes=[3], view="local")
        for rank in (0, 1, 2):
            bad_rank(quiet, rank, 1002, phase=1)
        review.again(quiet.incident().pk)
        assert quiet.incident().title == "NaN on one rank, then on all 4"

    def test_skipped_updates_keep_the_weights_and_drop_the_batch(self, quiet):
        quiet.steps(1001, 1002)
        quiet.finding("nonfinite_skipped", step=1002, severity="halt")
        plan = plans.newest(quiet.incident())
        assert plan.kind == "skip_and_continue"
        assert plan.skip == {"from": 1001 * 32, "to": 1002 * 32}


@pytest.mark.django_db
class TestJoining:
    def test_later_findings_join_the_one_incident(self, quiet):
        quiet.finding("nonfinite", step=1001)
        quiet.finding("nonfinite", step=1002)
        quiet.finding("loss_spike", step=1003)
        assert Incident.objects.count() == 1
        assert set(Finding.objects.values_list("incident", flat=True)) == {str(quiet.incident().pk)}
        assert LedgerRow.objects.filter(action="hold").count() == 1

    def test_an_earlier_bad_step_moves_the_first_bad_cell_and_the_dossier(self, quiet):
        bad_rank(quiet, 2, 1001)
        quiet.finding("nonfinite", step=1001, lanes=[2], view="local")
        FirstBad.objects.all().delete()
        bad_rank(quiet, 1, 999)
        quiet.finding("nonfinite", step=999, lanes=[1], view="local")
        incident = quiet.incident()
        assert (incident.first_bad["step"], incident.first_bad["ranks"]) == (999, [1])
        assert incident.dossier.first_bad_step == 999
        assert incident.timeline.filter(kind="first_bad").exists()

    def test_a_storm_asks_for_one_review(self, quiet):
        for rank in range(5):
            quiet.finding("nonfinite", step=1001, lanes=[rank])
        assert Work.objects.filter(kind=review.KIND).count() == 1

    def test_a_warning_that_becomes_a_halt_holds_the_same_incident(self, quiet):
        quiet.spike(at=1000, since=1000, severity="warn")
        incident = quiet.incident()
        assert (incident.holds, quiet.directive()) == (False, "continue")
        quiet.spike(at=1002, since=1000)
        assert Incident.objects.count() == 1
        incident = quiet.incident()
        assert (incident.holds, incident.severity, quiet.directive()) == (True, "halt", "hold")
        assert incident.title == "Loss spike that did not recover"


def _row_locks(run_id: int) -> int:
    """Return 1 when this transaction holds the run's row lock: another session cannot take it."""
    other = connections.create_connection("default")
    try:
        with other.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM runs_run WHERE id = %s AND id NOT IN"
                " (SELECT id FROM runs_run WHERE id = %s FOR NO KEY UPDATE SKIP LOCKED)",
                [run_id, run_id],
            )
            return int(cursor.fetchone()[0])
    finally:
        other.close()


@pytest.mark.django_db
class TestWhatHoldsNothing:
    @pytest.mark.parametrize(
        "fields",
        [
            {"kind": "loss_spike", "mode": "observe"},
            {"kind": "nonfinite", "mode": "off"},
            {"kind": "nonfinite_shown", "severity": "info", "series": "eval_loss"},
            {"kind": "nonfinite", "severity": "halt", "backfill": True},
            {"kind": "level_shift", "severity": "warn"},
        ],
    )
    def test_it_opens_nothing_and_is_not_asked_about_again(self, quiet, fields):
        quiet.finding(fields.pop("kind"), needs_incident=True, **fields)
        assert not Incident.objects.exists()
        assert quiet.directive() == "continue"
        assert opening.sweep_findings() == 0

    def test_a_new_baseline_is_written_to_the_ledger(self, quiet):
        quiet.finding("level_shift", severity="warn", step=999)
        row = LedgerRow.objects.get(run=quiet.run)
        assert (row.action, row.step) == ("reset", 999)

    def test_a_recovered_spike_freezes_goes_on_and_resolves_after_fifty_clean_steps(self, quiet):
        quiet.spike(at=1000, since=1000, severity="warn")
        assert quiet.incident().watch_until_step == 1050
        quiet.steps(1049, 1049)
        assert watching.sweep() == 0
        quiet.steps(1050, 1050)
        assert watching.sweep() == 1
        assert quiet.incident().state == Incident.State.RESOLVED
        assert quiet.directive() == "continue"

    def test_backfill_joins_the_incident_of_its_attempt(self, quiet):
        quiet.finding("nonfinite", step=1001)
        seq = current(quiet.run.pk).seq
        late = quiet.finding("nonfinite", step=990, backfill=True, severity="info")
        late.refresh_from_db()
        assert late.incident == str(quiet.incident().pk)
        assert current(quiet.run.pk).seq == seq


@pytest.mark.django_db
class TestWatchedWithoutAHold:
    def test_a_later_warning_is_watched_as_long_again(self, quiet):
        quiet.finding("loss_spike", step=1000, severity="warn")
        assert quiet.incident().watch_until_step == 1050
        quiet.finding("loss_spike", step=1009, severity="warn")
        assert quiet.incident().watch_until_step == 1059

    def test_an_earlier_one_and_one_that_is_only_told_shorten_or_lengthen_nothing(self, quiet):
        quiet.finding("loss_spike", step=1000, severity="warn")
        quiet.finding("loss_spike", step=998, severity="warn")
        quiet.finding("loss_spike", step=1020, severity="info")
        assert quiet.incident().watch_until_step == 1050


@pytest.mark.django_db
class TestHeldByHand:
    def test_a_responder_holds_with_a_reason(self, quiet, team):
        incident = actions.hold_by_hand(run=quiet.run, person=team.tomas, why="loss looks odd")
        assert (incident.kind, incident.title) == ("held_by_hand", "Held by hand")
        assert quiet.directive() == "hold"
        assert plans.newest(incident).kind == "resume_in_place"
        row = LedgerRow.objects.get(run=quiet.run)
        assert (row.decided_by, row.none_because["detector"]) == (
            str(team.tomas.opaque_id),
            "none: a person decided",
        )

    @pytest.mark.parametrize(
        ("who", "why", "code"), [("vera", "odd", "not-allowed"), ("tomas", "", "reason-needed")]
    )
    def test_it_is_refused_otherwise(self, quiet, team, who, why, code):
        with pytest.raises(Refused) as refused:
            actions.hold_by_hand(run=quiet.run, person=getattr(team, who), why=why)
        assert refused.value.code == code

    def test_a_run_that_a_warning_let_go_on_is_held(self, quiet, team):
        quiet.finding("loss_spike", step=1000, severity="warn")
        warned = quiet.incident()
        assert (warned.holds, quiet.directive()) == (False, "continue")
        incident = actions.hold_by_hand(run=quiet.run, person=team.tomas, why="it grows")
        assert incident.pk == warned.pk
        assert (quiet.incident().holds, quiet.incident().watch_until_step) == (True, None)
        assert current_document(quiet.run.pk)["incident"] == str(warned.pk)
        row = LedgerRow.objects.get(run=quiet.run, action="hold")
        assert row.decided_by == str(team.tomas.opaque_id)
        with pytest.raises(Refused) as refused:
            actions.hold_by_hand(run=quiet.run, person=team.tomas, why="again")
        assert refused.value.code == "held-already"

    def test_a_nan_that_joins_takes_over(self, quiet, team):
        actions.hold_by_hand(run=quiet.run, person=team.tomas, why="odd")
        quiet.steps(1001, 1001)
        quiet.finding("nonfinite", step=1001)
        review.again(quiet.incident().pk)
        incident = quiet.incident()
        assert incident.kind == "nonfinite"
        assert plans.newest(incident).kind == "rollback_and_skip"


@pytest.mark.django_db
class TestAcknowledge:
    def test_the_first_has_it_and_the_second_is_told(self, quiet, team):
        quiet.finding("nonfinite", step=1001)
        actions.acknowledge(incident=quiet.incident(), person=team.mira)
        assert quiet.incident().lead == team.mira
        with pytest.raises(Refused) as refused:
            actions.acknowledge(incident=quiet.incident(), person=team.tomas)
        assert refused.value.says.startswith("mira acknowledged at ")
        assert TimelineEntry.objects.filter(kind="acknowledged").count() == 1


@pytest.mark.django_db(transaction=True)
class TestAcrossTransactions:
    """Receivers that fail in the database, locks, and posts at the same time."""

    def test_after_incidents_broke_the_sweep_opens_exactly_one(self, quiet):
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION break_incidents() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE EXCEPTION 'incidents are broken'; END $$;"
                " CREATE TRIGGER broken BEFORE INSERT ON incidents_incident"
                " FOR EACH ROW EXECUTE FUNCTION break_incidents()"
            )
        try:
            rows = [quiet.finding("nonfinite", step=1001 + n, send=False) for n in range(3)]
            for row in rows:
                with pytest.raises(Exception, match="incidents are broken"):
                    quiet.tell(row)
            with transaction.atomic():
                lock_run(quiet.run.pk)
                set_directive(run=quiet.run, kind="hold", why="no incident could be opened")
            assert opening.sweep_findings() == 0  # still broken: it fails quietly and stays due
        finally:
            with connection.cursor() as cursor:
                cursor.execute("DROP FUNCTION break_incidents() CASCADE")
        assert Finding.objects.filter(needs_incident=True, incident="").count() == 3
        assert opening.sweep_findings() == 1
        assert opening.sweep_findings() == 0
        incident = quiet.incident()
        assert Incident.objects.count() == 1
        assert current_document(quiet.run.pk)["incident"] == str(incident.pk)
        assert Finding.objects.filter(incident=str(incident.pk)).count() == 3

    def test_only_the_opening_post_takes_the_run_lock(self, quiet):
        rows = [quiet.finding("nonfinite", step=1001, send=False) for _ in range(4)]
        with transaction.atomic():
            opening.take(quiet.run, rows[:1])
            assert _row_locks(quiet.run.pk) == 1
        with transaction.atomic():
            opening.take(quiet.run, rows[1:])
            assert _row_locks(quiet.run.pk) == 0

    def test_two_openings_at_once_give_one_incident(self, quiet):
        rows = [quiet.finding("nonfinite", step=1001, send=False) for _ in range(6)]
        start, failed = threading.Barrier(len(rows)), []

        def post(row: Finding) -> None:
            try:
                start.wait(10)
                quiet.tell(row)
            except Exception as error:
                failed.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=post, args=(row,)) for row in rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failed == []
        assert Incident.objects.count() == 1
        assert LedgerRow.objects.filter(action="hold").count() == 1
        assert Finding.objects.exclude(incident="").count() == 6
