"""Checkpoint bytes are read by a vault officer, above a size by two people, and never by a browser."""

import base64
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.test import Client

from andon.policy import EvidenceRule, Policy, VaultRules
from evidence.checkpoint_bytes import allowing, giving
from evidence.custody import verify_custody
from evidence.models import Dossier, Item, StoredObject, VaultRequest
from evidence.refused import Refused
from evidence.vault import BytesDiffer
from runs.actions import create_token
from runs.models import Membership, Person, Project, Role, Run
from runs.policies import set_policy
from tests.evidence import world
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)
KIND = "last_good_checkpoint"


@pytest.fixture(autouse=True)
def places(vault_dir: Path, sources: Path) -> None:
    """A directory vault, and a place for checkpoints."""


@pytest.fixture
def vera(project: Project) -> Person:
    """Vault officer."""
    person = Person.objects.create_user("vera", password="vera-password")
    Membership.objects.create(project=project, person=person, roles=[Role.VAULT_OFFICER])
    return person


@pytest.fixture
def run(project: Project) -> Run:
    return world.make_run(project=project)


@pytest.fixture
def dossier(run: Run, sources: Path) -> Dossier:
    """A checkpoint of three files and its manifest, sealed; and the topology."""
    world.on_disk(run, sources, 900)
    made = world.open_dossier(run, rules=world.policy(KIND, "topology"))
    world.work(made)
    assert {item.state for item in made.items.all()} == {"sealed"}
    return made


@pytest.fixture
def item(dossier: Dossier) -> Item:
    return Item.objects.select_related("dossier__run__project").get(dossier=dossier, kind=KIND)


@pytest.fixture
def large(run: Run, dossier: Dossier) -> None:
    """A policy under which this checkpoint is above what one person may read."""
    small = Policy(vault=VaultRules(read_alone_gb=0.000001))
    set_policy(run=run, document=small.document(), person=None, why="a test")


def ask(person: Person, item: Item, **given: Any) -> Any:
    headers = {"authorization": f"Bearer {create_token(person=person)}"}
    body = {"why": "replay step 900", "password": f"{person.username}-password"} | given
    address = f"/api/v1/dossiers/{item.dossier_id}/items/{item.pk}/read"
    return Client().post(address, body, content_type="application/json", headers=headers)


def problem(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("/problems/")


def body_of(answer: Any) -> bytes:
    assert answer.status_code == 200, answer.content
    body = b"".join(answer.streaming_content)
    assert answer["Content-Length"] == str(len(body))
    return body


def page_of(item: Item) -> str:
    return f"/vault/{item.dossier_id}/items/{item.pk}/read"


def browser(person: Person) -> Client:
    client = Client()
    client.force_login(person)
    return client


class TestOneOfficer:
    def test_all_files_come_as_one_archive_with_one_row_and_one_alarm(self, vera, dossier, item, alarms):
        stored = {one.path: one for one in StoredObject.objects.filter(item=item)}
        with tarfile.open(fileobj=io.BytesIO(body_of(ask(vera, item)))) as archive:
            assert archive.getnames() == sorted(stored)
            for name, one in stored.items():
                file = archive.extractfile(name)
                assert file is not None
                assert hashlib.sha256(file.read()).hexdigest() == one.sha256
        row = dossier.custody.get(what="checkpoint read")
        assert (row.who, row.item_name, row.object_sha256) == (str(vera.opaque_id), item.name, item.digest)
        assert row.data == {"why": "replay step 900", "files": 4, "bytes": item.bytes_total}
        body_of(ask(vera, item, path="shard-00000.bin"))
        ((what, says),) = alarms  # told once a day, written down each time
        assert (what, "vera reads last good checkpoint" in says) == ("checkpoint read", True)
        assert dossier.custody.filter(what="checkpoint read").count() == 2
        assert verify_custody(dossier) == []
        assert "checkpoint read" in text_of(browser(vera).get(f"/vault/{dossier.pk}")).split("took out")[1]

    def test_one_file_goes_on_where_it_broke(self, vera, item, sources):
        path = "shard-00001.bin"
        whole = next(sources.glob("step-*")).joinpath(path).read_bytes()
        answer = ask(vera, item, path=path)
        assert body_of(answer) == whole
        digest = base64.b64encode(hashlib.sha256(whole).digest()).decode()
        assert answer["Repr-Digest"] == f"sha-256=:{digest}:"
        assert body_of(ask(vera, item, path=path, start=1000)) == whole[1000:]
        assert body_of(ask(vera, item, path=path, start=len(whole))) == b""
        assert problem(ask(vera, item, path=path, start=len(whole) + 1)) == (409, "no-such-offset")
        assert problem(ask(vera, item, path="../etc/passwd")) == (409, "no-such-file")

    def test_its_files_are_listed(self, vera, item):
        headers = {"authorization": f"Bearer {create_token(person=vera)}"}
        told = Client(headers=headers).get(f"/api/v1/dossiers/{item.dossier_id}/items/{item.pk}/files").json()
        assert [one["path"] for one in told["files"]] == sorted(
            StoredObject.objects.filter(item=item).values_list("path", flat=True)
        )
        assert (told["two_people"], told["may_read_until"], told["why_not"]) == (False, None, "")

    def test_its_page_says_how_and_offers_no_bytes(self, vera, item):
        page = text_of(browser(vera).get(page_of(item)))
        assert "You may read it" in page
        assert f"/api/v1/dossiers/{item.dossier_id}/items/{item.pk}/read" in page
        here = f"/vault/{item.dossier_id}/objects/{StoredObject.objects.filter(item=item).first().pk}"
        assert browser(vera).post(here).status_code == 409, "not even a vault officer takes it by a browser"


class TestWhoMayNot:
    def test_others_are_refused_in_words(self, alice, bob, charlie, vera, dossier, item):
        for person in (alice, bob):
            assert problem(ask(person, item)) == (403, "not-allowed")
        assert problem(ask(charlie, item)) == (404, "unknown-item")
        assert problem(ask(vera, item, password="wrong")) == (403, "password")
        assert problem(ask(vera, item, why=" ")) == (409, "reason-needed")
        address = f"/api/v1/dossiers/{item.dossier_id}/items/{item.pk}/read"
        given = {"why": "x", "password": "vera-password"}
        # A browser's session is no token.
        assert browser(vera).post(address, given, content_type="application/json").status_code == 401
        assert not dossier.custody.filter(what="checkpoint read").exists()

    def test_what_is_no_checkpoint_or_not_there_says_so(self, vera, dossier, run):
        topology = dossier.items.get(kind="topology")
        assert problem(ask(vera, topology)) == (409, "no-checkpoint")
        later = world.open_dossier(run, rules=world.policy(KIND))
        answer = ask(vera, later.items.get())
        assert problem(answer) == (409, "nothing")
        assert "is planned: no bytes can be read yet" in answer.json()["detail"]

    def test_damaged_bytes_never_arrive_whole(self, vera, dossier, item, vault_dir):
        one = StoredObject.objects.filter(item=item, path="shard-00000.bin").get()
        file = vault_dir / "objects" / one.key
        file.chmod(0o644)
        file.write_bytes(b"?" * one.bytes_total)
        with pytest.raises(BytesDiffer):
            b"".join(ask(vera, item, path=one.path).streaming_content)
        with pytest.raises(BytesDiffer):
            b"".join(ask(vera, item).streaming_content)
        assert dossier.custody.filter(what="checkpoint read").count() == 2
        StoredObject.objects.filter(pk=one.pk).update(mismatch="bytes 0–9 are not those that were stored")
        assert problem(ask(vera, item, path="shard-00001.bin")) == (409, "damaged")

    def test_a_vault_that_is_away_gives_nothing_and_notes_nothing(self, vera, dossier, item, vault_dir):
        vault_dir.rename(vault_dir.with_name("away"))
        assert problem(ask(vera, item)) == (503, "not-given")
        assert not dossier.custody.filter(what="checkpoint read").exists()


class TestOnlyHeld:
    def test_what_is_only_held_is_read_where_it_is_held(self, vera, run, sources):
        world.on_disk(run, sources, 900)
        made = world.open_dossier(run, rules=world.policy(KIND))
        world.work(made)
        item = made.items.get()
        Item.objects.filter(pk=item.pk).update(state="held", sealed_at=None)
        StoredObject.objects.filter(item=item).delete()
        (there,) = sources.glob("step-*")
        whole = (there / "shard-00002.bin").read_bytes()
        (there / "shard-00002.bin").unlink()  # rotated away: the hard link is what is held
        assert body_of(ask(vera, item, path="shard-00002.bin")) == whole

    def test_what_lies_on_a_node_says_where(self, vera, run, sources, settings: LazySettings):
        world.on_disk(run, sources, 900)
        made = world.open_dossier(run, rules=world.policy(KIND))
        item = made.items.get()
        entry = {"path": "a.bin", "bytes": 3, "sha256": "0" * 64, "node": "n7", "tree": "", "inode": 1}
        Item.objects.filter(pk=item.pk).update(state="held", files=[entry])
        answer = ask(vera, item)
        assert problem(answer) == (503, "not-given")
        assert "lies on node n7" in answer.json()["detail"]


@pytest.mark.usefixtures("large")
class TestTwoPeople:
    def test_one_asks_another_agrees_and_only_the_first_reads(self, vera, alice, project, dossier, item):
        answer = ask(vera, item)
        assert problem(answer) == (409, "two-people")
        assert "another person has to agree first" in answer.json()["detail"]
        mine, hers = browser(vera), browser(alice)
        assert "Ask to read it" in text_of(mine.get(page_of(item)))
        assert mine.post(page_of(item), {"turn": "ask", "why": "replay step 900"}).status_code == 302
        assert "Read it" in text_of(hers.get(f"/vault/{dossier.pk}"))
        live = VaultRequest.objects.get()
        turn = {"turn": "agree", "request": live.pk}
        assert "may be read for 24" in text_of(hers.get(page_of(item)))
        assert mine.post(page_of(item), turn | {"password": "vera-password"}).status_code == 403
        assert hers.post(page_of(item), turn | {"password": "wrong"}).status_code == 403
        assert problem(ask(vera, item)) == (409, "two-people")
        assert hers.post(page_of(item), turn | {"password": "alice-password"}).status_code == 302
        assert "You may read it until" in text_of(mine.get(page_of(item)))
        body_of(ask(vera, item))
        row = dossier.custody.get(what="checkpoint read")
        assert row.data["agreed_by"] == str(alice.opaque_id)
        # Alice agreed; she does not read, nor does another officer.
        assert problem(ask(alice, item)) == (403, "not-allowed")
        other = Person.objects.create_user("vic", password="vic-password")
        Membership.objects.create(project=project, person=other, roles=[Role.VAULT_OFFICER])
        assert problem(ask(other, item)) == (409, "two-people")
        assert verify_custody(dossier) == []

    def test_a_day_later_and_for_other_bytes_it_is_over(self, vera, alice, item, clock):
        request = allowing.request_reading(item=item, person=vera, why="replay")
        allowing.approve_reading(request=request, person=alice)
        assert giving.give_all(item=item, person=vera, why="x").bytes_total > 0
        StoredObject.objects.filter(item=item, path="commit.json").update(bytes_total=7)
        with pytest.raises(Refused, match="another person has to agree"):
            allowing.permit(item, vera, "x")
        StoredObject.objects.filter(item=item, path="commit.json").update(
            bytes_total=next(one["bytes"] for one in item.files if one["path"] == "commit.json")
        )
        assert allowing.permit(item, vera, "x") == request
        clock.pass_days(1.01)
        with pytest.raises(Refused, match="another person has to agree"):
            allowing.permit(item, vera, "x")
        assert allowing.request_reading(item=item, person=vera, why="again").state == "open"

    def test_who_may_not_read_may_not_ask(self, bob, item):
        page = browser(bob).get(page_of(item))
        assert "A vault officer of the project may read it" in text_of(page)
        assert browser(bob).post(page_of(item), {"turn": "ask", "why": "x"}).status_code == 403


def test_raw_samples_are_read_by_an_officer_alone_as_they_were(vera, bob, run, sources):
    (sources / "batch.jsonl").write_text("what people wrote\n")
    uri = (sources / "batch.jsonl").as_uri()
    world.post(run, "artifact.available", data={"kind": "raw_samples", "uri": uri})
    made = world.open_dossier(run, rules=Policy(evidence=(EvidenceRule("raw_samples"),)))
    world.work(made)
    item = made.items.get()
    path = StoredObject.objects.get(item=item).path
    assert problem(ask(bob, item, path=path)) == (403, "not-allowed")
    answer = ask(vera, item, path=path)
    assert b"".join(answer.streaming_content) == b"what people wrote\n"
    assert made.custody.get(what="samples read").who == str(vera.opaque_id)
