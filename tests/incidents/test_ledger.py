"""The ledger: complete or refused, chained, and only ever added to."""

import json
from datetime import timedelta

import pytest
from django.core.checks import run_checks
from django.db import DatabaseError, connection, transaction
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from andon.canonical import canonical_bytes, exact
from andon.ledger import row_digest
from andon.wire import decode_events
from incidents import caps, ledger
from incidents.models import LedgerRow
from runs.models import Finding, Run
from runs.signals import action_reported
from tests.incidents.world import World

POSITIONS = {"loader_position": 1, "consumed_samples": 2, "optimizer_step": 3, "schedule_position": 4}
WHOLE = {
    "action": "quarantine",
    "why": "node-01 failed its canary",
    "decided_by": "canary v1",
    "step": 5,
    "ranks": [0, 1],
    "before": POSITIONS,
    "after": POSITIONS,
    "checkpoint": {"step": 4, "uri": "file:///c"},
}


def change(sql: str) -> None:
    """Change rows as somebody with the database in his hands would."""
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # no table with pending checks is altered
        cursor.execute("ALTER TABLE incidents_ledgerrow DISABLE TRIGGER USER")
        cursor.execute(sql)
        cursor.execute("ALTER TABLE incidents_ledgerrow ENABLE TRIGGER USER")


@pytest.fixture
def run(project):
    return World(project).run


@pytest.mark.django_db
class TestComplete:
    @pytest.mark.parametrize("field", ["step", "ranks", "before", "after", "checkpoint"])
    def test_a_missing_field_is_refused_by_name_unless_it_says_why(self, run, field):
        with pytest.raises(ledger.Incomplete, match=field):
            ledger.append(run=run, **{**WHOLE, field: None})
        row = ledger.append(run=run, **{**WHOLE, field: None}, none_because={field: "it has none"})
        assert getattr(row, field) is None

    def test_one_of_the_four_positions_needs_its_own_reason(self, run):
        partial = {**POSITIONS, "schedule_position": None}
        with pytest.raises(ledger.Incomplete, match=r"before\.schedule_position"):
            ledger.append(run=run, **{**WHOLE, "before": partial})
        ledger.append(
            run=run, **{**WHOLE, "before": partial}, none_because={"before.schedule_position": "no lr"}
        )

    def test_a_blank_reason_is_none(self, run):
        with pytest.raises(ledger.Incomplete):
            ledger.append(run=run, **{**WHOLE, "step": None}, none_because={"step": "  "})

    def test_a_skip_says_how_many_samples(self, run):
        with pytest.raises(ledger.Incomplete, match="samples_skipped"):
            ledger.append(run=run, **{**WHOLE, "action": "skip"})


@pytest.mark.django_db
class TestChain:
    def rows(self, run, n=4):
        return [ledger.append(run=run, **WHOLE) for _ in range(n)]

    def test_it_verifies(self, run):
        self.rows(run)
        assert ledger.verify(run) == []
        assert [row.seq for row in run.ledger.all()] == [1, 2, 3, 4]

    def test_a_changed_row_is_found(self, run):
        self.rows(run)
        change("UPDATE incidents_ledgerrow SET why = 'nothing happened' WHERE seq = 2")
        assert ledger.verify(run) == ["row 2 was changed after it was written: its digest does not fit"]

    def test_a_row_taken_out_is_found(self, run):
        self.rows(run)
        change("DELETE FROM incidents_ledgerrow WHERE seq = 2")
        assert ledger.verify(run) == ["row 2 is missing: the next one found is row 3"]

    def test_a_row_with_a_new_digest_of_its_own_breaks_the_next(self, run):
        rows = self.rows(run)
        rows[1].why = "nothing happened"
        digest = row_digest(ledger.document(rows[1], run.slug))
        change(f"UPDATE incidents_ledgerrow SET why = 'nothing happened', digest = '{digest}' WHERE seq = 2")
        assert ledger.verify(run) == ["row 3 names another row before it than row 2"]

    def looked_at(self, run, *shown):
        return ledger.checked(run, run.ledger.last(), run.ledger.filter(seq__in=shown))

    def test_a_page_reads_the_whole_once_and_then_what_was_added(self, run, django_assert_num_queries):
        self.rows(run)
        first = self.looked_at(run)
        self.rows(run, n=2)
        newest = run.ledger.last()
        with django_assert_num_queries(1):
            second = ledger.checked(run, newest, [])
        assert (first.rows, second.rows, second.head) == (4, 6, newest.digest)
        assert (first.at, second.wrong) == (second.at, [])
        with django_assert_num_queries(0):
            assert ledger.checked(run, newest, []) == second

    def test_a_page_tells_at_once_what_is_wrong_with_a_row_it_shows(self, run, monkeypatch):
        self.rows(run)
        assert not self.looked_at(run).wrong
        change("UPDATE incidents_ledgerrow SET why = 'nothing happened' WHERE seq = 2")
        said = ["row 2 was changed after it was written: its digest does not fit"]
        assert self.looked_at(run, 2, 3).wrong == said
        assert not self.looked_at(run, 3).wrong
        later = timezone.now() + ledger.WHOLE_EVERY
        monkeypatch.setattr(timezone, "now", lambda: later)
        assert self.looked_at(run, 3).wrong == said

    def test_a_page_tells_at_once_that_the_newest_rows_are_others(self, run):
        self.rows(run)
        assert not self.looked_at(run).wrong
        change("DELETE FROM incidents_ledgerrow WHERE seq = 3")
        change("UPDATE incidents_ledgerrow SET digest = '' WHERE seq = 4")
        assert len(self.looked_at(run).wrong) == 2

    def test_a_row_that_does_not_follow_is_told_when_it_is_added(self, run):
        self.rows(run)
        assert not self.looked_at(run).wrong
        self.rows(run, n=1)
        change("UPDATE incidents_ledgerrow SET previous = 'another' WHERE seq = 5")
        assert len(self.looked_at(run).wrong) == 2

    @pytest.mark.parametrize(
        "sql",
        [
            "UPDATE incidents_ledgerrow SET why = ''",
            "DELETE FROM incidents_ledgerrow",
            "TRUNCATE incidents_ledgerrow",
        ],
    )
    def test_nobody_may_change_it(self, run, sql):
        self.rows(run, 1)
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
                cursor.execute(sql)
        assert LedgerRow.objects.count() == 1

    def test_a_missing_trigger_is_reported_by_the_check(self, run):
        assert not [e for e in run_checks(databases=["default"]) if e.id == "incidents.E001"]
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE incidents_ledgerrow DISABLE TRIGGER incidents_ledgerrow_append_only")
        found = [e for e in run_checks(databases=["default"]) if e.id == "incidents.E001"]
        assert "incidents_ledgerrow_append_only" in found[0].msg

    def test_a_step_beyond_what_json_numbers_hold_still_chains(self, run):
        ledger.append(run=run, **{**WHOLE, "step": 2**63 - 1})
        assert ledger.verify(run) == []

    @pytest.mark.parametrize("value", [1.7e30, 1e22, -4.5e18, 2.0**60, 1e-300, 0.1, float("inf")])
    def test_numbers_of_any_size_still_chain(self, run, value):
        ledger.append(run=run, **WHOLE, detector={"name": "spike", "numbers": {"value": exact(value)}})
        assert ledger.verify(run) == []


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans())))
def test_canonical_bytes_do_not_depend_on_the_order_of_names(value):
    turned = dict(reversed(list(value.items())))
    assert canonical_bytes(value) == canonical_bytes(turned)


@pytest.mark.django_db
class TestReportedActions:
    def report(self, run, **data):
        body = {"type": "action", "step": 40, "ranks": "0-3", "attempt": 1, "data": data}
        decoded = decode_events(json.dumps(body).encode(), "application/json")
        assert not decoded.refused, decoded.refused
        with transaction.atomic():
            action_reported.send(sender=Run, run=run, event=decoded.events[0][1])

    def test_a_rollback_by_the_supervisor_becomes_a_row(self, run):
        self.report(
            run,
            action="rollback",
            loader_before=1440,
            loader_after=960,
            checkpoint="file:///c/30",
            reason="node lost",
            detector="supervisor",
        )
        row = LedgerRow.objects.get(run=run)
        assert (row.action, row.step, row.ranks, row.attempt) == ("rollback", 40, [0, 1, 2, 3], 1)
        assert row.before["loader_position"] == 1440
        assert row.none_because["before.optimizer_step"] == "the reporter named the loader position only"
        assert row.none_because["steps_lost"] == "the reporter did not say"
        assert ledger.verify(run) == []

    def test_what_it_has_none_of_is_kept_with_its_reason(self, run):
        self.report(
            run,
            action="hold",
            checkpoint="file:///c/30",
            detector={"name": "spike", "numbers": {"z": 13.0}},
            reason_none={"loader": "no loader yet"},
        )
        row = LedgerRow.objects.get(run=run)
        assert row.none_because["before"] == row.none_because["after"] == "no loader yet"
        assert row.decided_by == "spike"


@pytest.mark.django_db
class TestCaps:
    """Past its cap an action holds the run, whoever did it; what is no automatic action is not counted."""

    def skip(self, world, step, **more):
        data = {
            "action": "skip",
            "loader_before": step * 32 - 32,
            "loader_after": step * 32,
            "reason": "nonfinite on 1 rank(s): the update is dropped",
            "detector": "monitor",
            "reason_none": {"checkpoint": "none is involved"},
            **more,
        }
        body = {"type": "action", "step": step, "ranks": "0-3", "attempt": 1, "data": data}
        decoded = decode_events(json.dumps(body).encode(), "application/json")
        assert not decoded.refused, decoded.refused
        with transaction.atomic():
            action_reported.send(sender=Run, run=world.run, event=decoded.events[0][1])

    def test_one_skip_more_than_the_day_allows_holds_the_run(self, project):
        world = World(project)
        world.policy(caps={"skips_per_day": 2})
        world.steps(1, 9)
        self.skip(world, 7)
        self.skip(world, 8)
        assert world.directive() == "continue"
        assert [one.left for one in caps.today(world.run) if one.action == "skip"] == [0]
        self.skip(world, 9)
        assert world.directive() == "hold"
        incident = world.incident()
        assert (incident.kind, incident.title) == (
            "cap_reached",
            "Daily cap of automatic actions reached",
        )
        row = LedgerRow.objects.filter(run=world.run, action="skip").latest("seq")
        assert (row.budget, row.samples_skipped) == ({"used": 3, "of": 2}, 32)
        assert ledger.verify(world.run) == []

    def test_what_a_loss_scaler_drops_and_what_is_told_late_is_not_counted(self, project):
        world = World(project)
        world.policy(caps={"skips_per_day": 1})
        for step in range(2, 9):
            self.skip(world, step, numbers={"loss_scale": 1024.0})
        world.launch(2)
        for step in range(2, 9):
            self.skip(world, step)  # attempt 1, told after attempt 2 was launched
        assert world.directive() == "continue"
        assert ledger.used_today(world.run, "skip") == 0

    def test_a_hold_past_its_cap_holds_and_says_that_a_person_decides(self, project):
        world = World(project)
        world.policy(caps={"holds_per_day": 0})
        world.steps(1, 9)
        world.finding("nonfinite", step=9)
        assert world.directive() == "hold"
        assert world.incident().timeline.filter(kind="cap", text__contains="a person decides").exists()
        assert Finding.objects.filter(kind="cap_reached", incident=str(world.incident().pk)).count() == 1

    def test_what_a_person_decides_uses_nothing_of_the_budget(self, run):
        ledger.append(run=run, **{**WHOLE, "action": "rollback"}, steps_lost=1, gpu_hours_lost=0.1)
        assert ledger.used_today(run, "rollback") == 0

    def test_yesterday_does_not_count(self, run):
        yesterday = timezone.now() - timedelta(days=1)
        for _ in range(3):
            ledger.append(run=run, **{**WHOLE, "action": "skip"}, samples_skipped=1, cap=9, at=yesterday)
        row = ledger.append(run=run, **{**WHOLE, "action": "skip"}, samples_skipped=1, cap=9)
        assert row.budget == {"used": 1, "of": 9}
