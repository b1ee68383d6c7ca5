"""Rows that go to the database as JSON are the rows that Django would have written."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from django.db import DataError, IntegrityError, transaction
from django.utils import timezone

from runs.actions import create_run
from runs.inserting import insert, reserve
from runs.models import Directive, Run, Work

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    return create_run(name="inserting").run


def directive(run: Run, seq: int, **fields) -> Directive:
    known = {"kind": "hold", "attempt": 1, "document": {}, "since": timezone.now(), "why": "NaN"}
    return Directive(run=run, seq=seq, **known | fields)


class TestInsert:
    def test_every_kind_of_value_comes_back_as_it_was(self, run):
        since = datetime(2026, 11, 30, 1, 2, 3, 456_789, UTC)
        document = {"a": [1, 2.5, None, True, 'π\n"\\'], "large": 2**62, "empty": {}}
        row = directive(run, 2**62, attempt=None, document=document, since=since, why="it's 'quoted' \u2028")
        insert(row)
        back = Directive.objects.get(pk=row.pk)
        for field in Directive._meta.concrete_fields:
            assert getattr(back, field.attname) == getattr(row, field.attname), field.name

    def test_rows_get_their_own_keys_in_the_order_they_are_given(self, run):
        rows = [directive(run, seq) for seq in (5, 3, 4)]
        insert(*rows)
        assert [Directive.objects.get(pk=row.pk).seq for row in rows] == [5, 3, 4]
        assert not any(row._state.adding for row in rows)

    def test_rows_of_several_tables_go_together(self, run):
        first, work = directive(run, 2), Work(kind="test", key="1", not_before=timezone.now())
        insert(work, first)
        assert Directive.objects.get(pk=first.pk).seq == 2
        assert Work.objects.get(pk=work.pk).key == "1"

    def test_what_the_model_sets_by_itself_is_set(self, run):
        before = timezone.now() - timedelta(seconds=1)
        work = Work(kind="test", key="1", not_before=before)
        insert(work)
        assert Work.objects.get(pk=work.pk).created_at > before

    def test_a_key_that_was_reserved_is_kept(self, run):
        rows = [directive(run, seq) for seq in (2, 3)]
        reserve(*rows)
        keys = [row.pk for row in rows]
        insert(*rows)
        assert keys == list(
            Directive.objects.filter(seq__in=(2, 3)).order_by("seq").values_list("pk", flat=True)
        )
        last = directive(run, 4)
        insert(last)
        assert last.pk > max(keys)

    def test_a_constraint_refuses_as_it_does_for_save(self, run):
        with pytest.raises(IntegrityError), transaction.atomic():
            insert(directive(run, 1))
        with pytest.raises(DataError), transaction.atomic():
            insert(directive(run, 2, kind="a kind that is too long"))

    def test_a_number_that_json_has_not_is_refused(self, run):
        with pytest.raises(ValueError, match="JSON"):
            insert(directive(run, 2, document={"loss": math.nan}))

    def test_nothing_is_no_statement(self):
        insert()
