"""Evidence leaves by a browser: whole, named in the custody, to those who may, or not at all and in words."""

import hashlib
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.test import Client
from django.utils import timezone

from andon.bag_trees import open_tree
from andon.bag_verify import verify
from evidence.custody import verify_custody
from evidence.models import Dossier, Item, StoredObject
from evidence.pages import downloads
from evidence.vault import BytesDiffer, vault
from runs.keys import server_key
from runs.models import Membership, Person, Project, Role, Run
from tests.evidence import world
from tests.evidence.conftest import s3_url
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def store(settings: LazySettings, tmp_path: Path) -> Path:
    """A directory vault, and a directory from which checkpoints may be read."""
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.DATA_DIR = tmp_path / "data"
    settings.SOURCE_ROOTS = [tmp_path]
    return tmp_path / "vault"


@pytest.fixture
def run(project: Project) -> Run:
    return world.make_run(project=project)


@pytest.fixture
def dossier(run: Run, tmp_path: Path) -> Dossier:
    """Its topology, its event log and a checkpoint of three files are sealed."""
    world.on_disk(run, tmp_path / "scratch", 900)
    world.post(run, "step", 1000, data={"loss": 2.1})
    made = world.open_dossier(run, rules=world.policy("last_good_checkpoint", "topology", "event_log"))
    world.work(made)
    assert {item.state for item in made.items.all()} == {"sealed"}
    return made


@pytest.fixture
def as_viewer(charlie: Person, project: Project) -> Client:
    Membership.objects.create(project=project, person=charlie, roles=[Role.VIEWER])
    client = Client()
    client.force_login(charlie)
    return client


def one_of(dossier: Dossier, kind: str = "topology") -> StoredObject:
    return StoredObject.objects.filter(item__dossier=dossier, item__kind=kind).first()


def address(one: StoredObject) -> str:
    return f"/vault/{one.item.dossier_id}/objects/{one.pk}"


def access(dossier: Dossier) -> list[str]:
    """Return what people did, in order."""
    return list(dossier.custody.exclude(who="andon").order_by("seq").values_list("what", flat=True))


def kept(dossier: Dossier, body: Iterator[bytes]) -> StoredObject:
    """Put bytes into the vault as a rank's log, as a worker would have."""
    item = Item.objects.create(dossier=dossier, kind="rank_logs", name="rank logs", order=2)
    path = Path(vault().name.removeprefix("file://")) / "objects" / "evidence" / "log"
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for data in body:
            digest.update(data)
            file.write(data)
    return StoredObject.objects.create(
        item=item,
        path="rank-0.log",
        key="evidence/log",
        bytes_total=path.stat().st_size,
        sha256=digest.hexdigest(),
        stored_at=timezone.now(),
    )


def is_never_shown(answer) -> bool:
    """Return whether a browser can only save it: not show, run, guess or keep it."""
    return (
        answer["Content-Disposition"].startswith("attachment; filename")
        and answer["X-Content-Type-Options"] == "nosniff"
        and "no-store" in answer["Cache-Control"]
        and "sandbox" in answer["Content-Security-Policy"]
        and not answer["Content-Type"].startswith("text/")
    )


class TestBag:
    def test_it_verifies_and_is_a_row_with_the_persons_id(self, as_bob, bob, dossier, tmp_path):
        page = as_bob.get(f"/vault/{dossier.pk}")
        key, name = server_key().key_id, f"andon-pt-13b-dossier-{dossier.pk}.zip"
        assert f"andon verify {name} --key {key}" in text_of(page)
        assert "Export bag" in text_of(page)
        answer = as_bob.post(f"/vault/{dossier.pk}/bag")
        assert answer.status_code == 200
        assert is_never_shown(answer)
        assert answer["Content-Disposition"] == f'attachment; filename="{name}"'
        body = b"".join(answer.streaming_content)
        assert answer["Content-Length"] == str(len(body))
        (tmp_path / name).write_bytes(body)
        report = verify(open_tree(tmp_path / name), key)
        assert (report.problems, report.pinned) == ([], True)
        # A checkpoint is named by version and not inside.
        assert len(report.not_checked) == 4
        assert all("items/" in line and "file://" in line for line in report.not_checked)
        row = dossier.custody.get(what="exported bag")
        assert row.who == str(bob.opaque_id)
        assert "last_good_checkpoint" in row.data["named_kinds"]
        assert "exported bag" in text_of(as_bob.get(f"/vault/{dossier.pk}")).split("what people took out")[1]
        assert list((tmp_path / "data" / "spool").iterdir()) == []

    def test_what_a_browser_cannot_take_is_only_named(self, dossier, monkeypatch):
        small, large = one_of(dossier, "topology").bytes_total, 50 << 20
        StoredObject.objects.filter(item__kind="event_log").update(bytes_total=large)
        whole = downloads.bag_size(dossier)
        assert (whole.files, whole.bytes_total, whole.named) == (2, small + large, 4)
        monkeypatch.setattr(downloads, "BAG_BYTES", small + large - 1)
        part = downloads.bag_size(dossier)
        assert (part.files, part.bytes_total, part.named) == (1, small, 5)
        assert small <= part.inline_bytes < large

    def test_before_anything_is_sealed_the_button_is_shut_and_says_why(self, as_bob, run):
        made = world.open_dossier(run, rules=world.policy("topology"))
        page = as_bob.get(f"/vault/{made.pk}")
        assert 'aria-disabled="true" aria-describedby="no-bag">Export bag' in page.content.decode()
        assert "Nothing is sealed yet." in text_of(page)
        refused = as_bob.post(f"/vault/{made.pk}/bag")
        assert (refused.status_code, "Nothing is sealed yet." in text_of(refused)) == (409, True)
        assert access(made) == []

    def test_a_broken_chain_is_not_exported(self, as_bob, dossier):
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE evidence_custodyrow DISABLE TRIGGER append_only")
            cursor.execute("UPDATE evidence_custodyrow SET who = 'mallory' WHERE seq = 1")
            cursor.execute("ALTER TABLE evidence_custodyrow ENABLE TRIGGER append_only")
        page = text_of(as_bob.get(f"/vault/{dossier.pk}"))
        assert "Chain broken, do not export" in page
        refused = as_bob.post(f"/vault/{dossier.pk}/bag")
        assert (refused.status_code, "would not verify" in text_of(refused)) == (409, True)

    def test_a_store_that_is_gone_gives_a_page_and_a_row_that_says_so(self, as_bob, dossier, store):
        shutil.move(store, store.with_name("away"))
        answer = as_bob.post(f"/vault/{dossier.pk}/bag")
        assert answer.status_code == 503
        assert "The vault did not give it" in text_of(answer)
        assert "No such file" in text_of(answer)
        assert "Sign out" in text_of(answer)
        assert access(dossier) == ["exported bag", "export failed"]
        assert verify_custody(dossier) == []

    def test_bytes_that_are_not_what_was_sealed_make_no_bag(self, as_bob, dossier, store):
        path = store / "objects" / one_of(dossier).key
        path.chmod(0o644)
        path.write_bytes(b"?" * path.stat().st_size)
        answer = as_bob.post(f"/vault/{dossier.pk}/bag")
        assert answer.status_code == 503
        assert "The bag was not made" in text_of(answer)
        assert "stored with" in text_of(answer)


class TestObject:
    def test_it_comes_as_it_is_stored_and_is_a_row(self, as_bob, bob, dossier, store):
        one = one_of(dossier)
        page = as_bob.get(f"/vault/{dossier.pk}/items/{one.item_id}").content.decode()
        assert f'formaction="{address(one)}"' in page
        assert f'formaction="{address(one)}"' in as_bob.get(f"/vault/objects/{one.sha256}").content.decode()
        answer = as_bob.post(address(one))
        assert answer.status_code == 200
        assert is_never_shown(answer)
        assert answer["Content-Disposition"] == 'attachment; filename="topology.json"'
        body = b"".join(answer.streaming_content)
        assert body == (store / "objects" / one.key).read_bytes()
        assert answer["Content-Length"] == str(len(body))
        row = dossier.custody.get(what="downloaded")
        assert (row.who, row.item_name, row.object_sha256, row.data) == (
            str(bob.opaque_id),
            one.item.name,
            one.sha256,
            {"path": "topology.json"},
        )
        words = text_of(as_bob.get(f"/vault/{dossier.pk}")).split("what people took out")[1]
        assert "bob" in words
        assert "topology.json" in words

    def test_it_comes_from_a_bucket_by_version(self, as_bob, run, s3_endpoint, s3_bucket, settings, tmp_path):
        settings.VAULT_URL = s3_url(s3_endpoint, s3_bucket)
        made = world.open_dossier(run, rules=world.policy("topology"))
        world.work(made)
        one = one_of(made)
        # A newer version over it changes nothing.
        s3_endpoint.client().put_object(Bucket=s3_bucket, Key=one.key, Body=b"something else")
        body = b"".join(as_bob.post(address(one)).streaming_content)
        assert (len(body), hashlib.sha256(body).hexdigest()) == (one.bytes_total, one.sha256)
        answer = as_bob.post(f"/vault/{made.pk}/bag")
        (tmp_path / "bag.zip").write_bytes(b"".join(answer.streaming_content))
        assert verify(open_tree(tmp_path / "bag.zip"), server_key().key_id).problems == []

    def test_a_large_one_is_never_in_memory(self, as_bob, dossier):
        block = b"x" * (1 << 20)
        one = kept(dossier, (block for _ in range(48)))
        answer = as_bob.post(address(one))
        tracemalloc.start()
        try:
            total = sum(len(data) for data in answer.streaming_content)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert total == one.bytes_total == 48 << 20
        assert most < 8 << 20

    def test_changed_bytes_never_arrive_whole(self, as_bob, dossier, store):
        one = kept(dossier, iter([b"a" * (3 << 20)]))
        path = store / "objects" / one.key
        path.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
        sent: list[bytes] = []
        with pytest.raises(BytesDiffer, match="not what was sealed"):
            sent.extend(as_bob.post(address(one)).streaming_content)
        assert 0 < sum(map(len, sent)) < one.bytes_total

    @pytest.mark.parametrize("kind", ["last_good_checkpoint", "raw_samples"])
    def test_bytes_that_do_not_leave_this_way_are_refused_in_words(self, as_bob, dossier, kind):
        one = one_of(dossier, "last_good_checkpoint")
        Item.objects.filter(pk=one.item_id).update(kind=kind)
        says = downloads.why_not_kind(kind)
        page = as_bob.get(f"/vault/{dossier.pk}/items/{one.item_id}")
        assert says.split("'")[0] in text_of(page)
        assert "formaction" not in page.content.decode()
        assert "formaction" not in as_bob.get(f"/vault/objects/{one.sha256}").content.decode()
        refused = as_bob.post(address(one))
        assert (refused.status_code, says.split("'")[0] in text_of(refused)) == (409, True)
        assert access(dossier) == []

    def test_deleted_and_damaged_bytes_are_not_offered(self, as_bob, dossier):
        one = one_of(dossier)
        for fields, says in (
            ({"mismatch": "read with another SHA-256"}, "not what was sealed"),
            ({"deleted_at": timezone.now()}, "Its bytes were deleted on"),
        ):
            StoredObject.objects.filter(pk=one.pk).update(**fields)
            assert says in text_of(as_bob.get(f"/vault/{dossier.pk}/items/{one.item_id}"))
            assert says in text_of(as_bob.get(f"/vault/objects/{one.sha256}"))
            refused = as_bob.post(address(one))
            assert (refused.status_code, says in text_of(refused)) == (409, True)

    def test_a_store_that_is_gone_gives_a_page_and_no_row(self, as_bob, dossier, store, settings):
        one = one_of(dossier)
        shutil.move(store, store.with_name("away"))
        answer = as_bob.post(address(one))
        assert answer.status_code == 503
        assert "The object was not given" in text_of(answer)
        assert "No bytes left this server" in text_of(answer)
        settings.VAULT_URL = "s3+http://key:secret@127.0.0.1:9/bucket"
        assert as_bob.post(address(one)).status_code == 503
        assert access(dossier) == []


class TestWhoMay:
    def test_a_link_takes_nothing_out(self, as_bob, dossier):
        for path in (f"/vault/{dossier.pk}/bag", address(one_of(dossier))):
            assert as_bob.get(path).status_code == 405
        assert access(dossier) == []

    def test_a_viewer_reads_who_may_and_gets_nothing(self, as_viewer, dossier):
        one = one_of(dossier)
        for path in (
            f"/vault/{dossier.pk}",
            f"/vault/{dossier.pk}/items/{one.item_id}",
            f"/vault/objects/{one.sha256}",
        ):
            page = as_viewer.get(path)
            assert downloads.WHO in text_of(page), path
            assert "Export bag" not in text_of(page)
            assert "formaction" not in page.content.decode(), path
        for path in (f"/vault/{dossier.pk}/bag", address(one)):
            refused = as_viewer.post(path)
            assert (refused.status_code, "Only a member of the project" in text_of(refused)) == (403, True)
        assert access(dossier) == []

    def test_a_stranger_finds_neither(self, as_charlie, dossier):
        one = one_of(dossier)
        assert as_charlie.post(f"/vault/{dossier.pk}/bag").status_code == 404
        assert as_charlie.post(address(one)).status_code == 404
        assert access(dossier) == []

    def test_an_object_of_another_dossier_is_404(self, as_bob, dossier, run):
        other = world.open_dossier(run, rules=world.policy("topology"))
        assert as_bob.post(f"/vault/{other.pk}/objects/{one_of(dossier).pk}").status_code == 404


HOSTILE = {
    "node-0/rank-3.log": "rank-3.log",
    "../../etc/passwd": "passwd",
    'a"; filename="evil.exe': "a_ filename=_evil.exe",
    "a\r\nSet-Cookie: x=1": "a_Set-Cookie_ x=1",
    "log\u202egpj.exe": "log_gpj.exe",
    ".bashrc": "bashrc",
    "-rf": "rf",
    "C:\\x\\rank.log": "C_x_rank.log",
    "<script>alert(1)</script>": "script_",
    "/": "object",
    "журнал.log": "журнал.log",
    "A" * 10_000 + ".log": "A" * 80 + "_" + "A" * 35 + ".log",
}


def test_a_hostile_name_is_a_plain_file(as_bob, dossier):
    one = one_of(dossier)
    for path, name in HOSTILE.items():
        assert downloads.file_name(path) == name
        StoredObject.objects.filter(pk=one.pk).update(path=path)
        answer = as_bob.post(address(one))
        header = answer["Content-Disposition"]
        assert answer.status_code == 200, path
        assert header.startswith(("attachment; filename=", "attachment; filename*=utf-8''")), path
        assert header.isprintable(), path
        assert "Set-Cookie" not in answer.headers
        assert len(header) < 700
        assert list(answer.streaming_content)
    assert downloads.file_name("a\0b") == "a_b"
