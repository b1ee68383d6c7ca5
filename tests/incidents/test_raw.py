"""Raw, one click: lines out of the dossier, bounded, inert, noted in its custody; or why there are none."""

import json
from datetime import UTC, datetime

import pytest
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from andon import chain
from evidence.custody import verify_custody
from evidence.hashing import digest_of
from evidence.models import Item, StoredObject
from evidence.pages import excerpts
from evidence.sources import FileSource
from evidence.vault import key_for, vault
from incidents import batches, raw
from runs.models import FirstBad
from tests.incidents.world import World

pytestmark = pytest.mark.django_db

AT = datetime(2026, 11, 30, 3, 12, 7, tzinfo=UTC)


@pytest.fixture
def nan(project, settings, tmp_path):
    """Rank 3 on node-01 is bad at step 1,000, at 03:12:07 UTC."""
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.SOURCE_ROOTS = [tmp_path / "sources"]
    (tmp_path / "sources").mkdir()
    world = World(project)
    world.steps(999, 1000)
    FirstBad.objects.create(
        run=world.run,
        attempt=1,
        stream="rank",
        lane="3",
        step=1000,
        phase=2,
        view="local",
        occurred_at=AT,
        received_at=timezone.now(),
    )
    world.finding("nonfinite", step=1000, lanes=[3], view="local")
    return world


@pytest.fixture
def keep(nan, tmp_path):
    """Store bytes as a sealed file of an item, as the vault's workers do."""

    def store(kind, path, body, **source):
        dossier = nan.incident().dossier
        item = Item.objects.filter(dossier=dossier, kind=kind).latest("id")
        file = tmp_path / "spool"
        file.write_bytes(body)
        source_file = FileSource(file, len(body))
        sha256 = digest_of(source_file).sha256
        key = key_for(dossier.uid, item.pk, sha256)
        stored = vault().store(
            key, source_file, sha256=sha256, lock="none", until=None, progress=lambda _: None
        )
        one = StoredObject.objects.create(item=item, path=path, **stored.row(timezone.now()))
        table = [{"path": path, "bytes": len(body), "sha256": sha256}]
        item.state, item.sealed_at, item.held_at = "sealed", timezone.now(), timezone.now()
        item.digest, item.source = chain.file_table_digest(table), {**item.source, **source}
        item.save()
        return one

    return store


def lines(*steps, form="2026-11-30 03:00:00 INFO step {step} loss 2.5"):
    return "".join(form.format(step=step) + "\n" for step in steps).encode()


def custody(world):
    return list(
        world.incident().dossier.custody.filter(what=excerpts.READ).order_by("seq").values_list("who", "data")
    )


class TestLog:
    def test_fifty_lines_either_side_of_the_first_bad_step(self, nan, keep, team):
        keep("rank_logs", "rank-00003/train.log", lines(*range(800, 1100)))
        keep("rank_logs", "rank-00001/train.log", lines(1))
        found = raw.read(nan.incident(), team.mira, "log")
        assert found.about == "rank 3 on node-01, step 1,000"
        assert found.excerpt.found_by == "step"
        assert found.excerpt.path == "rank-00003/train.log"
        assert len(found.excerpt.lines) == 101
        assert "step 1000 " in found.excerpt.lines[found.excerpt.mark]
        assert custody(nan) == [(str(team.mira.opaque_id), {"path": "rank_logs/rank-00003/train.log"})]
        # The files of these tests are in no seal; of the chain itself nothing is wrong.
        assert [one for one in verify_custody(nan.incident().dossier) if "in no seal" not in one] == []

    def test_a_log_of_many_megabytes_is_searched_and_never_read_whole(self, nan, keep, team):
        body = b"".join(f"iteration {step}/ 9999 | {'x' * 900}\n".encode() for step in range(1, 12_000))
        assert len(body) > 2 * excerpts.MOST_BYTES
        keep("rank_logs", "rank-00003/train.log", body)
        found = raw.read(nan.incident(), team.mira, "log").excerpt
        assert found.lines[found.mark].startswith("iteration 1000/ ")
        assert len(found.lines) == 101
        assert found.bytes_read <= excerpts.MOST_BYTES

    @pytest.mark.parametrize(
        "form", ["2026-11-30T03:12:{:02d}.5Z x", "[2026-11-30 03:12:{:02d},500] x", "Nov 30 03:12:{:02d} n x"]
    )
    def test_without_a_step_the_time_finds_it(self, nan, keep, team, form):
        keep("rank_logs", "rank-00003/a.log", "".join(form.format(s) + "\n" for s in range(60)).encode())
        found = raw.read(nan.incident(), team.mira, "log").excerpt
        assert found.found_by == "time"
        assert ":07" in found.lines[found.mark]

    def test_a_log_that_says_neither_is_shown_at_its_end(self, nan, keep, team):
        keep("rank_logs", "rank-00003/a.log", b"".join(b"line %d\n" % n for n in range(500)))
        found = raw.read(nan.incident(), team.mira, "log").excerpt
        assert found.mark is None
        assert found.lines[-1] == "line 499"
        assert "no line of it names the step" in found.found_by

    def test_hostile_bytes_are_inert(self, nan, keep, team):
        evil = b"\x1b[2Jstep 1000 <script>alert(1)</script> \xe2\x80\xae \xff\xfe " + b"A" * 100_000
        keep("rank_logs", "rank-00003/a.log", evil + b"\n")
        client = Client()
        client.force_login(team.mira)
        html = client.get(f"/incidents/{nan.incident().pk}/raw/log").content.decode()
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert(1)" in html
        for character in ("\x1b", "\u202e"):
            assert character not in html
        assert "characters)" in html
        assert html.count("A" * 401) == 0

    def test_bytes_that_are_no_text_are_not_shown(self, nan, keep, team):
        keep("rank_logs", "rank-00003/core", b"\x80\x04\x95\0\0\0")
        found = raw.read(nan.incident(), team.mira, "log")
        assert found.excerpt is None
        assert "is no text: take it from the vault" in found.says

    def test_a_held_log_is_read_where_it_lies_and_masked(self, nan, team, tmp_path):
        log = tmp_path / "sources" / "r3.log"
        log.write_bytes(lines(999, 1000) + b"HF_TOKEN=hf_" + b"q" * 34 + b"\n")
        item = Item.objects.get(dossier=nan.incident().dossier, kind="rank_logs")
        item.state, item.held_at = "collecting", timezone.now()
        item.source = {"artifacts": [{"uri": log.as_uri(), "rank": 3, "node": "node-01", "bytes": 1}]}
        item.save()
        found = raw.read(nan.incident(), team.mira, "log")
        assert "Not sealed yet" in found.says
        assert found.excerpt.lines[-1] == "HF_TOKEN=[masked]"
        outside = tmp_path / "secret.log"
        outside.write_bytes(lines(1000))
        item.source = {"artifacts": [{"uri": outside.as_uri(), "rank": 3, "node": "", "bytes": 1}]}
        item.save()
        assert raw.read(nan.incident(), team.mira, "log").excerpt is None

    def test_what_is_not_there_is_a_sentence(self, nan, keep, team):
        Item.objects.filter(kind="rank_logs").update(state="missing", why="no rank log was offered")
        assert raw.read(nan.incident(), team.mira, "log").says == "Missing: no rank log was offered."
        keep("rank_logs", "rank-00001/a.log", lines(1000))
        assert "None of its own among the 1\u00a0file" in raw.read(nan.incident(), team.mira, "log").says
        assert custody(nan) == []

    def test_a_store_that_lost_it_says_so(self, nan, keep, team):
        one = keep("rank_logs", "rank-00003/a.log", lines(1000))
        StoredObject.objects.filter(pk=one.pk).update(key="evidence/gone")
        assert raw.read(nan.incident(), team.mira, "log").says.startswith("It cannot be read now: ")


class TestWho:
    def test_a_viewer_is_told_who_may_and_a_stranger_nothing(self, nan, keep, team):
        keep("rank_logs", "rank-00003/a.log", lines(1000))
        assert raw.read(nan.incident(), team.vera, "log").says == raw.WHO
        assert custody(nan) == []
        client = Client()
        client.force_login(team.charlie)
        assert client.get(f"/incidents/{nan.incident().pk}/raw/log").status_code == 404
        client.force_login(team.mira)
        assert client.get(f"/incidents/{nan.incident().pk}/raw/secrets").status_code == 404


class TestOthers:
    def test_the_kernel_log_is_that_of_the_node(self, nan, keep, team):
        offers = [
            {"uri": "file:///a/kern.log", "node": "node-00"},
            {"uri": "file:///b/kern.log", "node": "node-01"},
        ]
        keep("hardware_records", "00000-kern.log", b"Nov 30 03:12:07 node-00 wrong\n", artifacts=offers)
        keep(
            "hardware_records", "00001-kern.log", b"Nov 30 03:12:07 node-01 NVRM: Xid 94\n", artifacts=offers
        )
        found = raw.read(nan.incident(), team.mira, "kernel").excerpt
        assert found.lines == ["Nov 30 03:12:07 node-01 NVRM: Xid 94"]

    def test_without_a_kernel_log_what_the_node_reported(self, nan, keep, team):
        rows = [
            {"node": node, "type": "hardware.xid", "time": "t", "data": {"xid": 94}}
            for node in ("node-00", "node-01")
        ]
        keep("hardware_records", "hardware.ndjson", "".join(json.dumps(one) + "\n" for one in rows).encode())
        found = raw.read(nan.incident(), team.mira, "kernel")
        assert "No kernel log of node-01 was offered" in found.says
        assert len(found.excerpt.lines) == 1

    def test_the_batch_against_the_run(self, nan, keep, team):
        rows = [
            {"step": step, "rank": rank, "told": {"lengths": [100 + step % 7, 90], "shard": "cc-1"}}
            for step in range(900, 1001)
            for rank in range(4)
        ]
        mine = next(one for one in rows if (one["step"], one["rank"]) == (1000, 3))
        mine["told"] = {"lengths": [9000, 100], "shard": "cc-0412"}
        body = "".join(json.dumps(one) + "\n" for one in rows) + '{"cut'
        keep("batch_statistics", "batch_statistics.ndjson", body.encode())
        found = raw.read(nan.incident(), team.mira, "batch")
        (row,) = found.rows
        assert (row.name, row.value, row.stands_out) == ("lengths", "9,000, the largest of 2", True)
        assert row.median in ("90.00", "100.0", "101.0")
        assert found.told == [("shard", "cc-0412")]

    def test_an_error_a_rank_reported_stands_for_a_stack(self, nan, keep, team):
        rows = [
            {
                "type": "process.error",
                "rank": rank,
                "time": f"t{rank}",
                "data": {"message": f"boom {rank}", "py_callstack": "a\nb"},
            }
            for rank in (0, 3)
        ]
        keep(
            "flight_recorder",
            "flight_recorder.ndjson",
            "".join(json.dumps(one) + "\n" for one in rows).encode(),
        )
        found = raw.read(nan.incident(), team.mira, "stack").excerpt
        assert found.lines[:4] == ["rank 3 t3 process.error", "boom 3", "a", "b"]

    def test_a_stack_of_the_rank_itself(self, nan, keep, team):
        keep("flight_recorder", "rank-00003/stack.txt", b'File "train.py", line 88, in step\n')
        assert raw.read(nan.incident(), team.mira, "stack").excerpt.lines == [
            'File "train.py", line 88, in step'
        ]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["step", "rank", "told", "data", "x"]),
            st.none()
            | st.integers()
            | st.dictionaries(
                st.sampled_from("abc"),
                st.none()
                | st.booleans()
                | st.integers()
                | st.lists(st.integers() | st.text("ab", max_size=3), max_size=3),
                max_size=3,
            ),
            max_size=4,
        ),
        max_size=8,
    )
)
def test_no_line_of_statistics_is_a_problem(documents):
    found = batches.of_step(documents, 1, 0)
    assert all(isinstance(row.value, str) for row in found.rows)


@given(st.text(max_size=120))
def test_no_log_line_is_a_problem(line):
    for value in (raw.step_of(line), raw.time_key(AT)(line)):
        assert value is None or isinstance(value, float)
