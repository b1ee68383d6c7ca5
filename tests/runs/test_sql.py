"""The SQL objects Django cannot see: they exist, they refuse, and they are enough for `andon_app`."""

from datetime import timedelta

import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from runs.accounts import audit
from runs.checks import sql_objects_exist
from runs.models import AccountEvent, Directive, Event, Finding, Receipt, ServerKey
from runs.sql import APPEND_ONLY, OBJECTS
from runs.sweeps import forget_receipts, make_partitions
from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db

REFUSALS = ("append-only", "never changed", "kept for")


def refused(statement: str) -> bool:
    with connection.cursor() as cursor:
        try:
            with transaction.atomic():
                cursor.execute(statement)
        except DatabaseError as error:
            assert any(words in str(error) for words in REFUSALS)  # noqa: PT017
            return True
    return False


class TestAppendOnly:
    @pytest.mark.parametrize("table", [*APPEND_ONLY, "runs_finding", "runs_receipt"])
    def test_nobody_updates_deletes_or_empties(self, trainer: Trainer, table: str) -> None:
        from runs.policies import set_policy

        trainer.frame(rank_frame(steps=range(1), ranks=range(2)))
        seq = trainer.step(1, rank=0, loss="nan").json()["directive"]["seq"]
        trainer.events({"type": "directive.ack", "data": {"seq": seq, "state": "held", "ranks": [0]}})
        set_policy(run=trainer.run, document={}, person=None, why="test")
        audit.note(AccountEvent.Kind.SIGN_OUT)
        ServerKey.objects.create(key_id="k", public_key=b"k" * 32, since=timezone.now())
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            cursor.execute(f"SELECT count(*) FROM {table}")
            assert cursor.fetchone()[0] >= 1  # a table without rows would refuse nothing
        assert refused(f"UPDATE {table} SET id = id + 1")
        assert refused(f"DELETE FROM {table}")
        assert refused(f"TRUNCATE {table} CASCADE")

    def test_a_partition_cannot_be_emptied_past_its_parent(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'runs_event'::regclass"
            )
            partitions = [row[0] for row in cursor.fetchall()]
        assert len(partitions) >= 3
        assert all(refused(f"TRUNCATE {partition}") for partition in partitions)

    def test_a_finding_may_be_handed_to_an_incident_and_nothing_else(self, trainer: Trainer) -> None:
        trainer.step(1, rank=0, loss="nan")
        finding = Finding.objects.get(run=trainer.run)
        Finding.objects.filter(pk=finding.pk).update(incident="77", needs_incident=False)
        assert refused(f"UPDATE runs_finding SET severity = 'info' WHERE id = {finding.pk}")

    def test_receipts_are_forgotten_after_thirty_days_only(self, trainer: Trainer) -> None:
        old = timezone.now() - timedelta(days=31)
        for n in range(3):
            Receipt.objects.create(run=trainer.run, webhook_id=f"old{n}", body_sha256=b"x", received_at=old)
        trainer.step(1, loss=2.0)
        assert forget_receipts() == 3
        assert Receipt.objects.filter(run=trainer.run).count() == 1
        assert forget_receipts() == 0


class TestPartitions:
    def test_the_days_ahead_exist_and_making_them_twice_does_no_harm(self) -> None:
        assert make_partitions(9) == 4  # the migration made today and seven days, for two tables
        assert make_partitions(9) == 0

    def test_a_day_nobody_prepared_is_taken_by_the_default(self, trainer: Trainer) -> None:
        far = timezone.now() + timedelta(days=400)
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO runs_event (received_at, run_id, attempt, type, occurred_at, webhook_id)"
                " VALUES (%s, %s, 1, 'step', %s, 'x')",
                [far, trainer.run.pk, far],
            )
            cursor.execute("SELECT count(*) FROM runs_event_default")
            assert cursor.fetchone()[0] == 1
        assert Event.objects.filter(run_id=trainer.run.pk).count() == 1

    def test_todays_posts_lie_in_todays_partition(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        with connection.cursor() as cursor:
            partition = f"runs_event_{timezone.now():%Y%m%d}"
            cursor.execute(f"SELECT count(*) FROM {partition} WHERE run_id = %s", [trainer.run.pk])
            assert cursor.fetchone()[0] == 1

    def test_bodies_are_stored_outside_the_row_and_not_compressed(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT attstorage FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid"
                " WHERE attname = 'body' AND relname LIKE 'runs_frame%%' AND relkind IN ('r', 'p')"
            )
            assert {row[0] for row in cursor.fetchall()} == {"e"}


class TestCheck:
    def test_all_is_there(self) -> None:
        assert sql_objects_exist(databases=["default"]) == []

    @pytest.mark.parametrize(
        "statement",
        [
            "DROP TRIGGER append_only ON runs_directive",
            "ALTER TABLE runs_event DISABLE TRIGGER append_only",
            "DROP FUNCTION andon_take_events",
            "ALTER TABLE runs_frame DETACH PARTITION runs_frame_default",
        ],
    )
    def test_it_names_what_is_missing_or_disabled(self, statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)
        found = sql_objects_exist(databases=["default"])
        assert len(found) == 1
        assert any(name in found[0].msg for _, name, _ in OBJECTS)

    def test_without_a_database_it_asks_none(self) -> None:
        assert sql_objects_exist(databases=None) == []


@pytest.fixture
def as_app() -> None:
    """The rights of the application's role for the rest of the test."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = 'andon_app')")
        if not cursor.fetchone()[0]:
            pytest.skip("not run: the test server has no role andon_app")
        cursor.execute("SELECT pg_has_role(current_user, 'andon_app', 'MEMBER')")
        if not cursor.fetchone()[0]:
            pytest.skip("not run: the tests' role may not become andon_app")


class TestAppRole:
    def test_it_may_do_what_the_receiver_does_and_not_change_the_log(
        self, trainer: Trainer, as_app: None
    ) -> None:
        from runs import watching

        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL ROLE andon_app")
        assert trainer.step(1, loss=2.0).status_code == 202
        assert trainer.frame(rank_frame(steps=range(1), ranks=range(2))).status_code == 202
        assert trainer.step(2, rank=1, loss="nan").json()["directive"]["kind"] == "hold"
        watching.look(trainer.run.pk)
        make_partitions(9)
        forget_receipts()
        for table in APPEND_ONLY:
            with connection.cursor() as cursor:
                for statement in (
                    f"UPDATE {table} SET id = 1",
                    f"DELETE FROM {table}",
                    f"TRUNCATE {table}",
                ):
                    with pytest.raises(DatabaseError, match="permission denied"), transaction.atomic():
                        cursor.execute(statement)
        assert Directive.objects.filter(run=trainer.run).count() == 2


# Django's own tables are as Django makes them.
_COVERED = """
SELECT narrow.indexrelid::regclass::text, wide.indexrelid::regclass::text
FROM pg_index narrow JOIN pg_index wide USING (indrelid) JOIN pg_class t ON t.oid = indrelid
WHERE narrow.indexrelid <> wide.indexrelid AND t.relname ~ '^(runs|evidence|incidents)_'
  AND t.relname !~ '^runs_person_' AND NOT t.relispartition
  AND narrow.indpred IS NULL AND wide.indpred IS NULL AND narrow.indexprs IS NULL AND wide.indexprs IS NULL
  AND NOT narrow.indisunique AND narrow.indnkeyatts < wide.indnkeyatts
  AND (string_to_array(wide.indkey::text, ' '))[1:narrow.indnkeyatts]
      = string_to_array(narrow.indkey::text, ' ')
"""


def test_no_index_repeats_the_beginning_of_another() -> None:
    """It is a needless write per row, and the planner may take the narrow one and read a whole run."""
    with connection.cursor() as cursor:
        cursor.execute(_COVERED)
        assert cursor.fetchall() == []
