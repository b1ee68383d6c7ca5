"""The server's key is rotated: what was signed before still verifies, what a stranger signs never does."""

import os
import stat
import time
from datetime import datetime
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.core.management import CommandError, call_command
from django.db import transaction
from django.db.utils import DatabaseError
from django.utils import timezone

from andon import keys, permit
from andon.directive import Follower
from andon.permit import Permit
from andon.signing import SigningKey, sign_document
from andon.wire_times import format_time
from runs.directives import set_directive
from runs.keys import public_keys, server_key, trusted_keys
from runs.locks import lock_run
from runs.models import ServerKey
from tests.runs.conftest import Trainer

pytestmark = pytest.mark.django_db


@pytest.fixture
def key_file(tmp_path: Path, settings: LazySettings) -> Path:
    settings.SIGNING_KEY_FILE = tmp_path / "signing-key.pem"
    return tmp_path / "signing-key.pem"


def published(trainer: Trainer) -> dict:
    return trainer.client.get("/.well-known/andon-keys.json").json()


def test_every_process_signs_with_the_new_key_at_once(key_file: Path) -> None:
    old = server_key()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    call_command("rotate_key")
    assert server_key().key_id == SigningKey.load(key_file).key_id != old.key_id
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert os.listdir(key_file.parent) == [key_file.name]
    assert set(trusted_keys()) == {old.key_id, server_key().key_id}
    assert public_keys({old.key_id, "0" * 64}) == [old.public_bytes]


def test_the_document_says_from_when_until_when(key_file: Path, trainer: Trainer) -> None:
    first = server_key().key_id
    alone = published(trainer)["keys"]
    assert [(row["key_id"], row["current"], row["until"]) for row in alone] == [(first, True, None)]
    call_command("rotate_key")
    second = server_key().key_id
    call_command("rotate_key")
    rows = published(trainer)["keys"]
    assert [row["key_id"] for row in rows] == [server_key().key_id, second, first]
    assert [row["current"] for row in rows] == [True, False, False]
    times = [datetime.fromisoformat(row["from"]) for row in rows]
    ends = [row["until"] and datetime.fromisoformat(row["until"]) for row in rows]
    assert ends == [None, times[0], times[1]]
    assert times[2] < times[1] < times[0] <= timezone.now()


def test_jobs_launched_before_and_after_it_believe_what_both_keys_signed(
    key_file: Path, trainer: Trainer
) -> None:
    old = server_key().key_id
    before = trainer.get("directive").json()
    one = permit.issue(_permit(trainer.run.slug), server_key())
    early = Follower(trainer.run.slug, trusted={old})
    call_command("rotate_key")
    with transaction.atomic():
        run = lock_run(trainer.run.pk)
        set_directive(run=run, kind="hold")
    after = trainer.get("directive").json()
    assert after["key_id"] == server_key().key_id
    early.learn(published(trainer))
    assert early.offer(after)
    late = Follower(trainer.run.slug, trusted={server_key().key_id})
    assert not late.offer(before)
    late.learn(published(trainer))
    assert late.offer(before)
    assert late.offer(after)
    ring = keys.follow(published(trainer), {server_key().key_id})
    assert permit.verify(one, trusted=ring, at=time.time()).permit == "p"


def test_a_stolen_key_is_believed_by_nobody_and_its_orders_are_given_again(
    key_file: Path, trainer: Trainer
) -> None:
    old = server_key().key_id
    with transaction.atomic():
        set_directive(
            run=lock_run(trainer.run.pk), kind="hold", incident="7", mode="exit", deadline=timezone.now()
        )
    before = trainer.get("directive").json()
    with pytest.raises(CommandError, match="must not sign on"):
        call_command("rotate_key", "--stolen", "--to", str(key_file.with_name("next.pem")))
    call_command("rotate_key", "--stolen")
    after = trainer.get("directive").json()
    assert after["key_id"] == server_key().key_id != old
    assert after["seq"] == before["seq"] + 1
    same = ("kind", "run", "attempt", "mode", "deadline", "incident", "plan", "permit")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert set(trusted_keys()) == {server_key().key_id}
    assert set(trusted_keys(for_evidence=True)) == {old, server_key().key_id}
    rows = published(trainer)["keys"]
    assert [(row["key_id"], row["stolen"]) for row in rows] == [(server_key().key_id, False), (old, True)]
    late = Follower(trainer.run.slug, trusted={server_key().key_id})
    late.learn(published(trainer))
    assert not late.offer(before)
    assert late.offer(after)


def _permit(run: str) -> Permit:
    now_ns = time.time_ns()
    return Permit(
        permit="p",
        run=run,
        attempt=2,
        incident="7",
        approval="1",
        approval_digest="0" * 64,
        plan="resume_in_place",
        issued_at=format_time(now_ns),
        expires_at=format_time(now_ns + 3600 * 10**9),
    )


def test_a_row_in_the_table_alone_makes_no_key_trusted(key_file: Path) -> None:
    stranger, own = SigningKey.generate(), server_key()
    content = {"schema": keys.HANDOVER_SCHEMA, "from": stranger.key_id, "to": own.key_id, "at": "2026-01-01"}
    forged = [sign_document(content, stranger), sign_document(content, stranger)]
    for key, handover in ((stranger, None), (own, forged)):
        ServerKey.objects.create(
            key_id=key.key_id, public_key=key.public_bytes, since=timezone.now(), handover=handover
        )
    assert set(trusted_keys()) == {own.key_id}


def test_rows_are_never_changed(key_file: Path) -> None:
    server_key()
    call_command("rotate_key")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        ServerKey.objects.update(handover=None)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        ServerKey.objects.all().delete()


def test_a_mounted_key_is_replaced_by_hand_before_or_after(key_file: Path, tmp_path: Path) -> None:
    first = server_key()
    call_command("rotate_key", "--to", str(tmp_path / "next.pem"))
    assert server_key().key_id == first.key_id
    second = SigningKey.load(tmp_path / "next.pem")
    # Between the command and the swap both are known, and the old one still signs.
    assert set(trusted_keys()) == {first.key_id, second.key_id}
    with pytest.raises(CommandError, match="handed over already"):
        call_command("rotate_key")
    os.replace(key_file, tmp_path / "old.pem")
    os.replace(tmp_path / "next.pem", key_file)
    assert server_key().key_id == second.key_id
    assert set(trusted_keys()) == {first.key_id, second.key_id}
    # The other way round: swapped first, handed over after.
    os.replace(key_file, tmp_path / "old.pem")
    third = server_key()
    assert set(trusted_keys()) == {third.key_id}
    call_command("rotate_key", "--from", str(tmp_path / "old.pem"))
    assert set(trusted_keys()) == {first.key_id, second.key_id, third.key_id}
    with pytest.raises(CommandError, match="same key"):
        call_command("rotate_key", "--to", str(_copy(key_file, tmp_path / "same.pem")))


def _copy(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes())
    return target


def test_a_command_that_was_killed_before_the_swap_is_finished_by_the_next(key_file: Path) -> None:
    old = server_key()
    call_command("rotate_key", "--to", f"{key_file}.next")
    assert server_key().key_id == old.key_id
    call_command("rotate_key")
    assert server_key().key_id != old.key_id
    assert ServerKey.objects.count() == 2
    assert not Path(f"{key_file}.next").exists()


def test_a_file_without_a_key_changes_nothing(key_file: Path, tmp_path: Path) -> None:
    (tmp_path / "old.pem").write_text("nonsense")
    with pytest.raises(CommandError, match="not rotated"):
        call_command("rotate_key", "--from", str(tmp_path / "old.pem"))
    assert not ServerKey.objects.exists()
