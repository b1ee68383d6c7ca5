"""Exports of the ledger: CSV, JSON and Parquet of the same rows, checked without the server."""

import io
import json
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from andon import ledger as chain
from andon.cli import main
from andon.ledger_files import FORMATS, Unreadable, read, write
from incidents import ledger
from incidents.models import LedgerRow
from tests.incidents.test_ledger import WHOLE, change
from tests.incidents.world import World
from tests.pages.words import text_of


@pytest.fixture
def run(project):
    return World(project).run


def fill(run, rows=4):
    """Append rows with everything that a format could lose."""
    for number in range(rows):
        ledger.append(
            run=run,
            **{
                **WHOLE,
                "why": f'=HYPERLINK("x"), "quoted",\r\nsecond line, café {number}',
                "step": 2**62 + number,
                "decided_by": "-v1",
                "detector": {"name": "spike", "numbers": {"z": 13.25, "bound": 1e300, "loss": None}},
            },
            gpu_hours_lost=3.0 * number,
            none_because={"steps_lost": "'quoted' reason"},
            cap=2,
        )


def exported(run, form, folder: Path) -> Path:
    path = folder / f"ledger.{form}"
    path.write_bytes(b"".join(write(ledger.documents(run), form)))
    return path


@pytest.mark.django_db
class TestFormats:
    def test_every_format_gives_back_the_same_rows_and_they_verify(self, run, tmp_path):
        fill(run)
        kept = list(ledger.documents(run))
        for form in FORMATS:
            rows = list(read(exported(run, form, tmp_path)))
            assert [row["digest"] for row in rows] == [row["digest"] for row in kept]
            assert chain.verify(rows, head=kept[-1]["digest"]) == []
            assert [row["step"] for row in rows] == [2**62 + n for n in range(4)]
            assert [row["why"] for row in rows] == [row["why"] for row in kept]

    def test_a_ledger_without_a_row_is_a_file_too(self, run, tmp_path):
        for form in FORMATS:
            assert list(read(exported(run, form, tmp_path))) == []

    def test_more_rows_than_are_read_at_once_come_whole(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr(ledger, "_ROWS_AT_ONCE", 3)
        monkeypatch.setattr("andon.ledger_files.ROWS_AT_ONCE", 2)
        fill(run, 7)
        for form in FORMATS:
            assert chain.verify(read(exported(run, form, tmp_path))) == []
            assert len(list(read(exported(run, form, tmp_path)))) == 7
        assert pq.ParquetFile(tmp_path / "ledger.parquet").num_row_groups == 4

    def test_a_spreadsheet_runs_nothing_of_it(self, run, tmp_path):
        fill(run, 1)
        text = exported(run, "csv", tmp_path).read_text()
        assert "\"'=HYPERLINK" in text
        assert ",'-v1," in text

    def test_columns_of_parquet_are_typed(self, run, tmp_path):
        fill(run, 1)
        schema = pq.ParquetFile(exported(run, "parquet", tmp_path)).schema_arrow
        assert str(schema.field("at").type) == "timestamp[us, tz=UTC]"
        assert str(schema.field("step").type) == "int64"


@pytest.mark.django_db
class TestTampering:
    """One altered cell, row or end of an exported file is caught."""

    @pytest.mark.parametrize("form", FORMATS)
    def test_an_edited_row_is_caught(self, run, tmp_path, form, capsys):
        fill(run)
        path = exported(run, form, tmp_path)
        assert main(["ledger", "verify", str(path)]) == 0
        assert "verified: 4 rows" in capsys.readouterr().out
        rows = list(read(path))
        rows[1]["samples_skipped"] = 12
        path.write_bytes(b"".join(write(rows, form)))
        assert main(["ledger", "verify", str(path)]) == 1
        assert "row 2 was changed after it was written" in capsys.readouterr().err

    def test_a_byte_edited_in_the_file_is_caught(self, run, tmp_path, capsys):
        fill(run)
        path = exported(run, "csv", tmp_path)
        path.write_text(path.read_text().replace("café 2", "cafe 2"), newline="")
        assert main(["ledger", "verify", str(path)]) == 1
        assert "row 3 was changed" in capsys.readouterr().err

    def test_a_row_taken_out_and_one_with_a_digest_of_its_own_are_caught(self, run):
        fill(run)
        rows = list(ledger.documents(run))
        assert "row 2 is missing" in chain.verify([rows[0], *rows[2:]])[0]
        rows[1]["why"] = "nothing happened"
        rows[1]["digest"] = chain.row_digest(rows[1])
        assert chain.verify(rows) == ["row 3 names another row before it than row 2"]

    def test_a_cut_end_is_caught_by_the_newest_digest(self, run, tmp_path, capsys):
        fill(run)
        head = LedgerRow.objects.get(run=run, seq=4).digest
        path = tmp_path / "cut.json"
        path.write_bytes(b"".join(write(list(ledger.documents(run))[:3], "json")))
        assert main(["ledger", "verify", str(path)]) == 0
        assert "a cut end would not show" in capsys.readouterr().out
        assert main(["ledger", "verify", str(path), "--head", head]) == 1
        assert "rows were cut off" in capsys.readouterr().err

    def test_a_row_of_another_run_is_caught(self, run, project):
        other = World(project, "other").run
        fill(run, 1)
        fill(other, 2)
        mixed = [*ledger.documents(run), list(ledger.documents(other))[1]]
        assert "row 2 belongs to another run" in chain.verify(mixed)

    @pytest.mark.parametrize(
        ("name", "body"),
        [
            ("a.csv", b"not,a,ledger\r\n"),
            ("a.csv", ",".join(chain.FIELDS).encode() + b"\r\nx\r\n"),
            ("a.json", b"[1]"),
            ("a.json", b"{"),
            ("a.parquet", b"PAR1"),
            ("a.txt", b""),
        ],
    )
    def test_what_is_no_ledger_is_unreadable_and_not_a_failure(self, tmp_path, name, body, capsys):
        (tmp_path / name).write_bytes(body)
        assert main(["ledger", "verify", str(tmp_path / name)]) == 2
        with pytest.raises(Unreadable):
            list(read(tmp_path / name))


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "why": texts,
                "decided_by": texts,
                "step": st.none() | st.integers(0, 2**63 - 1),
                "gpu_hours_lost": st.none() | st.floats(0, 1e9),
                "ranks": st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3),
                "none_because": st.dictionaries(texts, texts, max_size=2),
            }
        ),
        max_size=4,
    ),
    st.sampled_from(FORMATS),
)
def test_any_row_survives_any_format(tmp_path_factory, given_rows, form):
    rows, previous = [], ""
    for seq, fields in enumerate(given_rows, start=1):
        row = dict.fromkeys(chain.FIELDS) | fields
        row |= {"schema": chain.SCHEMA, "run": "r", "seq": seq, "action": "hold", "previous": previous}
        row |= {"at": f"2026-10-29T03:12:0{seq}.000001Z"}
        row["digest"] = previous = chain.row_digest(row)
        rows.append(row)
    path = tmp_path_factory.mktemp("any") / f"l.{form}"
    path.write_bytes(b"".join(write(rows, form)))
    back = list(read(path))
    assert chain.verify(back) == []
    assert [row["why"] for row in back] == [row["why"] for row in rows]


@pytest.mark.django_db
class TestDoors:
    """Page, API and command hand out the same bytes to whom may see the run."""

    def test_the_page_hands_out_each_format(self, run, team, tmp_path):
        fill(run)
        client = Client()
        client.force_login(team.vera)
        for form in FORMATS:
            answer = client.get(f"/runs/{run.slug}/ledger.{form}")
            assert answer.streaming
            assert answer["Content-Disposition"] == f'attachment; filename="ledger-{run.slug}.{form}"'
            path = tmp_path / f"got.{form}"
            path.write_bytes(answer.getvalue())
            assert chain.verify(read(path)) == []

    def test_a_broken_chain_is_not_exported(self, run, team):
        fill(run)
        change("UPDATE incidents_ledgerrow SET why = 'nothing happened' WHERE seq = 2")
        client = Client()
        client.force_login(team.vera)
        answer = client.get(f"/runs/{run.slug}/ledger.csv")
        assert answer.status_code == 409
        assert "Chain broken, do not export: row 2 was changed" in text_of(answer)
        with pytest.raises(CommandError, match="row 2 was changed"):
            call_command("ledger", run.slug)

    def test_a_stranger_gets_nothing(self, run, team):
        fill(run)
        client = Client()
        client.force_login(team.charlie)
        for form in FORMATS:
            assert client.get(f"/runs/{run.slug}/ledger.{form}").status_code == 404

    def test_the_command_checks_and_writes(self, run, tmp_path):
        fill(run)
        out = io.StringIO()
        path = tmp_path / "l.json"
        call_command("ledger", run.slug, "--out", str(path), stdout=out)
        newest = LedgerRow.objects.get(run=run, seq=4).digest
        assert out.getvalue() == f"verified: 4 rows, newest {newest}\n"
        assert json.loads(path.read_text())["rows"][0]["seq"] == 1
        with pytest.raises(CommandError, match="ending"):
            call_command("ledger", run.slug, "--out", str(tmp_path / "l.xls"))


@pytest.mark.django_db(transaction=True)
def test_twelve_writers_at_once_make_one_chain_and_count_the_cap_exactly(project):
    run = World(project).run
    start, wrong = threading.Barrier(12), []

    def write_rows():
        try:
            start.wait(20)
            for _ in range(3):
                with transaction.atomic():
                    ledger.append(run=run, **{**WHOLE, "action": "skip"}, samples_skipped=32, cap=20)
        except Exception as error:
            wrong.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=write_rows) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    rows = list(LedgerRow.objects.filter(run=run).order_by("seq"))
    assert [row.seq for row in rows] == list(range(1, 37))
    assert [row.budget["used"] for row in rows] == list(range(1, 37))
    assert [row.seq for row in rows if ledger.past_cap(row)] == list(range(21, 37))
    assert ledger.verify(run) == []
