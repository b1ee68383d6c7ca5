"""Raw samples: only by policy, never stored as they are, gone when their key is."""

import os
from pathlib import Path

import pytest

from andon.policy import Policy
from andon.sample_cipher import HEAD_BYTES
from evidence.collecting.samples import Erased, approve_erasure, read_samples, request_erasure
from evidence.custody import verify_custody
from evidence.models import Dossier, SampleKey, StoredObject
from evidence.refused import Refused
from evidence.vault import vault
from runs.models import Membership, Person, Role, Run
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)
SIZES = (0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 5)


def stored(run: Run, sources: Path, body: bytes) -> tuple[Dossier, StoredObject]:
    path = sources / "batch-1000.jsonl"
    path.write_bytes(body)
    world.post(run, "artifact.available", data={"kind": "raw_samples", "uri": path.as_uri()})
    dossier = world.open_dossier(run, rules=world.policy("raw_samples"))
    world.work(dossier)
    item = dossier.items.get()
    assert item.state == "sealed", item.why
    return dossier, item.stored_objects.get()


@pytest.fixture
def officer(bob: Person) -> Person:
    """Bob, who may also open the vault."""
    Membership.objects.filter(person=bob).update(roles=[Role.APPROVER, Role.VAULT_OFFICER])
    return bob


def test_by_default_no_policy_names_them() -> None:
    assert "raw_samples" not in {rule.kind for rule in Policy().evidence}


@pytest.mark.parametrize("size", SIZES)
def test_they_are_stored_encrypted_and_read_by_a_vault_officer(
    sources: Path, vault_dir: Path, officer: Person, alice: Person, size: int
) -> None:
    body = (b'{"text": "what somebody wrote"}\n' * (size // 32 + 1))[:size]
    dossier, one = stored(world.make_run(), sources, body)
    kept = vault().open(one.key, one.version_id).read()
    assert b"somebody wrote" not in kept
    for person, why, code in ((alice, "let me", "not-allowed"), (officer, " ", "reason-needed")):
        with pytest.raises(Refused) as refused:
            read_samples(one=one, person=person, why=why)
        assert refused.value.code == code
    assert b"".join(read_samples(one=one, person=officer, why="which documents were these?")) == body
    row = dossier.custody.get(what="samples read")
    assert (row.who, row.object_sha256) == (str(officer.opaque_id), one.sha256)


def test_two_people_erase_them_at_any_date_and_the_proof_stays_true(
    sources: Path, vault_dir: Path, officer: Person, alice: Person
) -> None:
    dossier, one = stored(world.make_run(), sources, b"what somebody wrote")
    request = request_erasure(dossier=dossier, person=alice, why="a person asked")
    with pytest.raises(Refused) as refused:
        approve_erasure(request=request, person=alice)
    assert refused.value.code == "not-you"
    assert b"".join(read_samples(one=one, person=officer, why="once more")) == b"what somebody wrote"
    approve_erasure(request=request, person=officer)
    assert SampleKey.objects.get(dossier=dossier).key is None
    with pytest.raises(Refused, match="erased"):
        read_samples(one=one, person=officer, why="too late")
    assert vault().open(one.key, one.version_id).read(), "the stored bytes stay, and say nothing"
    assert verify_custody(dossier) == []
    with pytest.raises(Refused, match="no raw samples"):
        request_erasure(dossier=dossier, person=alice, why="again")


@pytest.mark.parametrize("harm", ["flipped", "cut at a chunk", "swapped chunks", "not ours"])
def test_what_was_changed_does_not_read(sources: Path, vault_dir: Path, officer: Person, harm: str) -> None:
    _, one = stored(world.make_run(), sources, os.urandom(3 << 20))
    file = vault_dir / "objects" / one.key
    body = file.read_bytes()
    head, chunk = HEAD_BYTES, (1 << 20) + 16
    harmed = {
        "flipped": body[:-1] + bytes([body[-1] ^ 1]),
        "cut at a chunk": body[: head + chunk],
        "swapped chunks": body[:head] + body[head + chunk : head + 2 * chunk] + body[head : head + chunk],
        "not ours": b"plain text",
    }[harm]
    file.chmod(0o644)
    file.write_bytes(harmed)
    with pytest.raises(Erased):
        b"".join(read_samples(one=one, person=officer, why="look"))


def test_each_dossier_has_a_key_of_its_own(sources: Path, vault_dir: Path) -> None:
    stored(world.make_run(), sources, b"x")
    stored(world.make_run("other"), sources, b"x")
    keys = [bytes(row.key) for row in SampleKey.objects.all()]
    assert len(set(keys)) == 2
