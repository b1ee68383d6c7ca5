"""A person is erased: nothing that names them is left in chain, seals or bags, and all of it verifies."""

import base64
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from andon.bag_trees import open_tree
from andon.bag_verify import verify
from evidence.actions import note_access, open_dossier, waive
from evidence.custody import verify_custody
from evidence.models import CustodyRow, Dossier, Hold, Item, Seal
from evidence.proof.exporting import export_bag
from runs.erasing import erase
from runs.models import Membership, Person, Project, Role
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)
NAMES = ("zebulon", "quimby")


@pytest.fixture
def person(project: Project) -> Person:
    one = Person.objects.create_user(
        "zebulon.quimby", "zebulon.quimby@example.org", "a-password", first_name="Zebulon", last_name="Quimby"
    )
    Membership.objects.create(project=project, person=one, roles=[Role.RESPONDER, Role.ADMIN])
    return one


def acted(person: Person, sources: Path, tmp_path: Path) -> Dossier:
    """Have a person open a dossier, waive an item, take an object out and export a bag."""
    run = world.make_run()
    world.on_disk(run, sources, 900)
    dossier = open_dossier(run=run, person=person, why="kept for the review")
    item = Item.objects.get(dossier=dossier, kind="batch_ids")
    waive(item=item, person=person, why="the loader is not ours")
    world.work(dossier, rounds=8)
    note_access(dossier=dossier, person=person, what="downloaded", object_sha256="0" * 64, path="rank-0.log")
    call_command("export_bag", str(tmp_path / "bag"), "--dossier", str(dossier.pk), "--as", person.username)
    return dossier


def everything(dossier: Dossier, *bags: Path) -> str:
    """Return all that chain, seals, items, holds and bags say, decoded."""
    rows: list[Any] = []
    for model in (CustodyRow, Item, Hold):
        rows += model.objects.filter(dossier=dossier).values()
    for seal in Seal.objects.filter(dossier=dossier):
        rows.append(base64.b64decode(seal.envelope["payload"]).decode())
    rows += [path.read_text(errors="replace") for bag in bags for path in bag.rglob("*") if path.is_file()]
    for bag in bags:
        statement = json.loads((bag / "andon/statement.json").read_text())
        rows.append(base64.b64decode(statement["payload"]).decode())
    return json.dumps(rows, default=str).lower()


def test_every_act_is_a_row_by_opaque_id(
    person: Person, sources: Path, vault_dir: Path, tmp_path: Path
) -> None:
    dossier = acted(person, sources, tmp_path)
    mine = dossier.custody.filter(who=str(person.opaque_id)).order_by("seq")
    assert [row.what for row in mine] == ["opened", "waived", "downloaded", "exported bag"]
    assert mine[2].data == {"path": "rank-0.log"}
    with pytest.raises(CommandError, match="no person"):
        call_command("export_bag", str(tmp_path / "x"), "--dossier", str(dossier.pk), "--as", "nobody")


def test_after_erasing_nothing_names_the_person_and_everything_verifies(
    person: Person, sources: Path, vault_dir: Path, tmp_path: Path, client: Client, as_alice: Client
) -> None:
    dossier = acted(person, sources, tmp_path)
    client.force_login(person)
    assert client.get(f"/vault/{dossier.pk}").status_code == 200
    assert b"zebulon" in as_alice.get(f"/vault/{dossier.pk}").content
    out = StringIO()
    call_command("erase_person", "zebulon.quimby", stdout=out)
    assert str(person.opaque_id) in out.getvalue()
    assert client.get(f"/vault/{dossier.pk}").status_code == 302  # signed out
    export_bag(dossier, tmp_path / "after")
    told = everything(dossier, tmp_path / "bag", tmp_path / "after")
    assert str(person.opaque_id) in told
    assert [name for name in NAMES if name in told] == []
    assert not Person.objects.filter(username__icontains="zebulon").exists()
    assert not Person.objects.filter(email__icontains="quimby").exists()
    assert verify_custody(dossier) == []
    for bag in ("bag", "after"):
        assert verify(open_tree(tmp_path / bag)).problems == []
    assert b"zebulon" not in as_alice.get(f"/vault/{dossier.pk}").content.lower()
    with pytest.raises(CommandError, match="there is no"):
        call_command("erase_person", "zebulon.quimby")


def test_erasing_takes_every_right(person: Person, alice: Person) -> None:
    gone = erase(person)
    assert (gone.is_active, gone.has_usable_password(), gone.memberships.count()) == (False, False, 0)
    assert (gone.first_name, gone.last_name, gone.email) == ("", "", "")
    assert gone.opaque_id == person.opaque_id
