"""The deletion gate and the resume gate."""

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction
from django.test import Client
from django.utils import timezone
from hypothesis import example, given
from hypothesis import strategies as st

from evidence.actions import waive
from evidence.gates import may_delete, resume_gate
from evidence.models import DeletionAllow, Hold, Item
from evidence.pages.listing import item_lines
from evidence.queries import evidence_counts, last_good, signed_facts
from evidence.refused import Refused
from evidence.uris import UnusableUri, ancestors, covers, normalise, spellings
from runs.directives import set_directive
from runs.models import Person, Run
from tests.evidence import world

database = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("given_uri", "plain"),
    [
        ("/ckpt/step-900", "file:///ckpt/step-900"),
        ("file:///ckpt//step-900/", "file:///ckpt/step-900"),
        ("FILE://localhost/ckpt/x/../step-900/.", "file:///ckpt/step-900"),
        ("file:/ckpt/step-900", "file:///ckpt/step-900"),
        ("file:///ckpt/%73tep-900", "file:///ckpt/step-900"),
        ("file:///ckpt/a%252e%252e/%2e%2e/step-900", "file:///ckpt/step-900"),
        ("s3://Bucket/run/step-900/", "s3://bucket/run/step-900"),
        ("S3A://bucket/run/step-900?versionId=abc", "s3://bucket/run/step-900"),
        ("s3://bucket/../bucket2", "s3://bucket/bucket2"),
        ("gs://b/x#frag", "gs://b/x"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("/", "file://"),
    ],
)
def test_uris_have_one_spelling(given_uri: str, plain: str) -> None:
    assert normalise(given_uri) == plain


@pytest.mark.parametrize(
    "uri", ["", "ckpt/step-900", "step", "s3:", "file:ckpt", "/a\0b", "x" * 5000, "/a/\ud800"]
)
def test_what_names_no_object_is_unusable(uri: str) -> None:
    with pytest.raises(UnusableUri):
        normalise(uri)


@given(st.text(max_size=60).map(lambda text: "s3://b/" + text))
@example("s3://b/%2525252e")
@example("s3://b/%2f..%2f..")
def test_normalising_twice_changes_nothing(uri: str) -> None:
    try:
        once = normalise(uri)
    except UnusableUri:
        return
    assert normalise(once) == once


@given(st.lists(st.sampled_from(["a", "b", "step-1", "step-10", "..", ".", "", "%2e%2e"]), max_size=6))
def test_a_uri_is_covered_by_all_above_it_and_by_none_beside_it(parts: list[str]) -> None:
    inner = normalise("/root/" + "/".join(parts))
    for above in ancestors(inner):
        assert covers(above, inner)
        assert covers(inner, above)
    assert not covers(inner + "0", inner)


def ask(run: Run, *uris: str) -> dict[str, tuple[bool, str]]:
    return {one["uri"]: (one["allow"], one["reason"]) for one in may_delete(run=run, uris=uris)}


@database
def test_a_hold_covers_itself_what_is_below_and_what_is_above_at_path_boundaries(tmp_path: Path) -> None:
    run = world.make_run()
    world.commit(run, 900, "s3://ckpt/run/step-900", [])
    world.open_dossier(run)
    denied = [
        "s3://ckpt/run/step-900",
        "S3://ckpt/run/step-900/",
        "s3://ckpt/run//step-900/shard-0.bin",
        "s3://ckpt/run/step-9/../step-900",
        "s3://ckpt/run/step%2D900",
        "s3://ckpt/run/step-900?versionId=x",
        "s3://ckpt/run",
        "s3://ckpt",
    ]
    allowed = [
        "s3://ckpt/run/step-9",
        "s3://ckpt/run/step-9000",
        "s3://ckpt/run2",
        "s3://ckpt2",
        "s3://ckpt/run/step-90",
    ]
    answers = ask(run, *denied, *allowed)
    assert [uri for uri in denied if answers[uri][0]] == []
    assert [uri for uri in allowed if not answers[uri][0]] == []
    assert "incident 7" in answers["s3://ckpt/run/step-900"][1]
    assert [one["uri"] for one in may_delete(run=run, uris=denied)] == denied


@database
def test_a_symbolic_link_does_not_hide_what_is_held(tmp_path: Path) -> None:
    run = world.make_run()
    target = tmp_path / "step-900"
    target.mkdir()
    (tmp_path / "latest").symlink_to(target)
    world.commit(run, 900, target.as_uri(), [])
    world.open_dossier(run)
    assert not ask(run, f"{tmp_path}/latest")[f"{tmp_path}/latest"][0]
    assert spellings(f"{tmp_path}/latest")[1] == normalise(str(target))


@database
def test_holds_are_counted_and_the_last_release_frees() -> None:
    run = world.make_run()
    world.commit(run, 900, "s3://ckpt/step-900", [])
    one, two = world.open_dossier(run), world.open_dossier(run)
    Hold.objects.filter(dossier=one).update(released_at=timezone.now())
    assert not ask(run, "s3://ckpt/step-900")["s3://ckpt/step-900"][0]
    Hold.objects.filter(dossier=two).update(released_at=timezone.now())
    assert ask(run, "s3://ckpt/step-900")["s3://ckpt/step-900"][0]


@database
def test_an_allow_counts_as_gone_for_ten_minutes() -> None:
    run = world.make_run()
    world.commit(run, 800, "s3://ckpt/step-800", [])
    world.commit(run, 900, "s3://ckpt/step-900", [])
    assert ask(run, "s3://ckpt/step-900/")["s3://ckpt/step-900/"][0]
    dossier = world.open_dossier(run)
    good = last_good(dossier)
    assert good is not None
    assert good.step == 800
    item = Item.objects.get(dossier=dossier, kind="last_good_checkpoint")
    assert "step 900 was allowed to be deleted" in item.why
    DeletionAllow.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    later = last_good(world.open_dossier(run))
    assert later is not None
    assert later.step == 900


@database
@pytest.mark.parametrize("number", range(6))
def test_an_allow_and_a_freeze_plan_never_pass_each_other(number: int) -> None:
    run = world.make_run()
    world.commit(run, 800, "s3://ckpt/step-800", [])
    world.commit(run, 900, "s3://ckpt/step-900", [])
    barrier = threading.Barrier(2)
    seen: dict[str, object] = {}

    def delete() -> None:
        try:
            barrier.wait()
            seen["allow"] = may_delete(run=run, uris=["s3://ckpt/step-900"])[0]["allow"]
        finally:
            connection.close()

    def open_one() -> None:
        try:
            barrier.wait()
            good = last_good(world.open_dossier(run))
            seen["step"] = good.step if good else None
        finally:
            connection.close()

    threads = [threading.Thread(target=delete), threading.Thread(target=open_one)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen in ({"allow": True, "step": 800}, {"allow": False, "step": 900})


@database
def test_while_a_hold_has_no_dossier_nothing_may_be_deleted() -> None:
    run = world.make_run()
    with transaction.atomic():
        set_directive(run=run, kind="hold")
    assert "not planned yet" in ask(run, "s3://ckpt/x")["s3://ckpt/x"][1]


@database
def test_only_its_own_run_may_ask_for_a_checkpoint() -> None:
    run, other = world.make_run(), world.make_run("other")
    world.commit(other, 900, "s3://ckpt/other/step-900", [])
    assert "another run" in ask(run, "s3://ckpt/other")["s3://ckpt/other"][1]
    assert ask(other, "s3://ckpt/other/step-900")["s3://ckpt/other/step-900"][0]


@database
def test_a_relative_uri_is_refused_with_a_reason() -> None:
    assert "absolute" in ask(world.make_run(), "step-900")["step-900"][1]


@database
def test_each_line_of_the_resume_gate_says_what_is_missing() -> None:
    run = world.make_run()
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint", "topology", "batch_ids"))
    lines = {line.kind: line for line in resume_gate(dossier).lines}
    assert not resume_gate(dossier).open
    assert "no verified checkpoint at step 999 or earlier" in lines["last_good_checkpoint"].says
    assert lines["topology"].says == "planned: nothing is held yet"
    assert evidence_counts(dossier) == {"required": 3, "held": 0, "sealed": 0, "missing": 1}


@database
def test_a_very_large_checkpoint_opens_the_gate_once_held_with_digests() -> None:
    run = world.make_run()
    world.commit(run, 900, "s3://ckpt/step-900", [])
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    item = dossier.items.get()
    for size, digest, opens in (
        (100 * 10**9, "a" * 64, False),
        (5_700 * 10**9, "a" * 64, True),
        (5_700 * 10**9, "", False),
    ):
        Item.objects.filter(pk=item.pk).update(
            state="held", held_at=timezone.now(), bytes_total=size, digest=digest
        )
        assert resume_gate(dossier).open is opens, (size, digest)
    Item.objects.filter(pk=item.pk).update(bytes_total=5_700 * 10**9, digest="a" * 64)
    before = signed_facts(dossier)
    Item.objects.filter(pk=item.pk).update(state="sealed", sealed_at=timezone.now())
    assert signed_facts(dossier) == before, "sealing it later must not void an approval"


@database
def test_a_checkpoint_that_nothing_keeps_says_so_until_the_run_asks_the_gate() -> None:
    run = world.make_run()
    world.commit(run, 900, "s3://ckpt/step-900", [])
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint", "first_bad_checkpoint"))
    good, bad = (line.says for line in resume_gate(dossier).lines)
    assert good == "planned: nothing is held yet; not protected until copied"
    assert "not protected" not in bad, "there is no such checkpoint yet"
    assert next(line.reason for line in item_lines(dossier)) == "not protected until copied"
    ask(run, "s3://ckpt/step-100")
    good, _ = (line.says for line in resume_gate(dossier).lines)
    assert good == "planned: nothing is held yet"


@database
def test_a_waiver_opens_the_gate_by_name_and_reason(bob: Person, charlie: Person) -> None:
    run = world.make_run()
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    item = dossier.items.get()
    for person, why, code in ((charlie, "because", "not-allowed"), (bob, "  ", "reason-needed")):
        with pytest.raises(Refused) as refused:
            waive(item=item, person=person, why=why)
        assert refused.value.code == code
    waive(item=item, person=bob, why="the run has just begun")
    gate = resume_gate(dossier)
    assert gate.open
    assert gate.lines[0].says == "waived: the run has just begun"
    assert signed_facts(dossier)[0]["by"] == str(bob.opaque_id)
    row = dossier.custody.last()
    assert row is not None
    assert (row.what, row.who) == ("waived", str(bob.opaque_id))
    assert "bob" not in json.dumps([row.who, row.data])


@database
def test_unsigned_questions_are_refused(client: Client) -> None:
    run = world.make_run()
    body = json.dumps({"uris": ["s3://x/y"]})
    answer = client.post(f"/api/v1/runs/{run.slug}/deletions", body, content_type="application/json")
    assert answer.status_code == 401
    assert not DeletionAllow.objects.exists()
