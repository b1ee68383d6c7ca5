"""Whom to trust after the server's key was rotated."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon import keys, permit
from andon.directive import Directive, Follower
from andon.permit import Permit, PermitError
from andon.signing import SignatureError, SigningKey, fingerprint
from andon.wire_times import format_time, parse_time

TIMES = ["2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"]
K = [SigningKey.generate() for _ in range(4)]
STRANGER = SigningKey.generate()


def public(key: SigningKey, since: str, until: str | None, handover: list | None) -> keys.PublicKey:
    return keys.PublicKey(key.key_id, base64.b64encode(key.public_bytes).decode(), since, until, handover)


def published(*pairs: tuple[SigningKey, SigningKey, str]) -> dict:
    rows = [public(new, at, None, keys.handover(old, new, at)) for old, new, at in reversed(pairs)]
    rows.append(public(pairs[0][0], "2025-12-01T00:00:00Z", pairs[0][2], None))
    return json.loads(json.dumps(keys.document(rows)))


def issued(key: SigningKey, issued_at: str) -> dict:
    one = Permit(
        permit="p-1",
        run="a",
        attempt=2,
        incident="7",
        approval="1",
        approval_digest="0" * 64,
        plan="resume_in_place",
        issued_at=issued_at,
        expires_at=format_time(parse_time(issued_at)[0] + 12 * 3600 * 10**9),
    )
    return permit.issue(one, key)


ROTATED = published((K[0], K[1], TIMES[0]), (K[1], K[2], TIMES[1]))


@pytest.mark.parametrize("pinned", K[:3])
def test_from_any_pinned_key_all_that_were_handed_over_are_trusted(pinned: SigningKey):
    assert set(keys.follow(ROTATED, {pinned.key_id})) == {key.key_id for key in K[:3]}


def test_the_document_names_keys_by_fingerprint_and_says_until_when():
    rows = ROTATED["keys"]
    assert all(fingerprint(base64.b64decode(row["public_key"])) == row["key_id"] for row in rows)
    assert [(row["from"], row["until"]) for row in rows][-1] == ("2025-12-01T00:00:00Z", TIMES[0])


def test_a_key_that_is_only_listed_is_not_trusted():
    document = published((K[0], K[1], TIMES[0]))
    document["keys"].insert(0, keys.document([public(STRANGER, TIMES[0], None, None)])["keys"][0])
    assert STRANGER.key_id not in keys.follow(document, {K[0].key_id})
    assert set(keys.follow(document, {STRANGER.key_id})) == {STRANGER.key_id}


def test_both_keys_must_have_signed_the_same_handover():
    good, other = keys.handover(K[0], K[1], TIMES[0]), keys.handover(K[0], K[1], TIMES[1])
    alone = keys.handover(STRANGER, STRANGER, TIMES[0])
    for pair in (
        [good[0], other[1]],
        [good[0], alone[1]],
        [good[1], good[0]],
        [good[0]],
        [{**good[0], "to": STRANGER.key_id}, good[1]],
    ):
        document = published((K[0], K[1], TIMES[0]))
        document["keys"][0]["handover"] = pair
        assert set(keys.follow(document, {K[0].key_id})) == {K[0].key_id}, pair


def test_two_successors_of_one_key_are_a_contradiction():
    document = published((K[0], K[1], TIMES[0]))
    document["keys"] += published((K[0], STRANGER, TIMES[1]))["keys"]
    ring = keys.follow(document, {K[0].key_id})
    assert set(ring) == {K[0].key_id}


def test_a_stolen_key_leads_nowhere_and_keeps_what_it_sealed():
    thief = SigningKey.generate()
    honest = published((K[0], K[1], TIMES[0]))
    honest["keys"].insert(0, keys.document([public(K[2], TIMES[1], None, None)])["keys"][0])
    honest["keys"][0]["handover"] = keys.given_up(K[1].key_id, K[2], TIMES[1])
    everybody = {key.key_id for key in K[:3]}
    assert set(keys.follow(honest, {K[2].key_id})) == {K[2].key_id}
    assert set(keys.follow(honest, {K[1].key_id})) == {K[0].key_id, K[1].key_id}
    ring = keys.follow(honest, {K[2].key_id}, for_evidence=True)
    assert set(ring) == everybody
    ring.check_time(K[1].key_id, parse_time(TIMES[1])[0])
    with pytest.raises(SignatureError):
        ring.check_time(K[1].key_id, parse_time(TIMES[2])[0])
    # What the thief adds leads nowhere: neither on from the stolen key, nor by words of another key.
    honest["keys"].insert(0, keys.document([public(thief, TIMES[2], None, None)])["keys"][0])
    for planted in (
        keys.handover(K[1], thief, TIMES[0]),
        keys.given_up(K[2].key_id, thief, TIMES[0]),
        keys.given_up(thief.key_id, K[1], TIMES[0]),
    ):
        honest["keys"][0]["handover"] = planted
        found = keys.follow(honest, {K[2].key_id}, for_evidence=True)
        assert K[2].key_id in found
        assert found.until_ns[K[2].key_id] is None
        assert set(found) <= everybody


def test_a_permit_of_the_key_before_is_accepted_and_one_after_its_handover_is_not():
    ring = keys.follow(published((K[0], K[1], TIMES[1])), {K[1].key_id})
    before, after = "2026-01-31T23:00:00Z", "2026-02-01T01:00:00Z"
    at = parse_time("2026-02-01T02:00:00Z")[0] / 1e9
    assert permit.verify(issued(K[0], before), trusted=ring, at=at).permit == "p-1"
    assert permit.verify(issued(K[1], after), trusted=ring, at=at).permit == "p-1"
    with pytest.raises(PermitError, match="signed until"):
        permit.verify(issued(K[0], after), trusted=ring, at=at)
    with pytest.raises(PermitError, match="not a trusted key"):
        permit.verify(issued(STRANGER, after), trusted=ring, at=at)
    with pytest.raises(SignatureError):
        ring.check_time(K[0].key_id, parse_time(after)[0])


def test_a_job_launched_before_the_rotation_follows_a_directive_made_after_it():
    follower = Follower("a", trusted={K[0].key_id})
    after = Directive(kind="hold", seq=2, run="a", attempt=1, since=TIMES[2]).sign(K[2])
    assert not follower.offer(after)
    assert not follower.knows_key_of(after)
    follower.learn({"nonsense": True})
    assert not follower.offer(after)
    follower.learn(ROTATED)
    assert follower.offer(after)
    # An answer without handovers later takes nothing away, neither the new key nor the old one's end.
    follower.learn({"keys": []})
    assert follower.knows_key_of(after)
    late = Directive(kind="continue", seq=3, run="a", attempt=1, since=TIMES[1]).sign(K[0])
    assert not follower.offer(late)
    in_time = Directive(kind="continue", seq=3, run="a", attempt=1, since="2025-12-31T00:00:00Z").sign(K[0])
    assert follower.offer(in_time)


def test_the_command_follows_a_saved_key_document(tmp_path, capsys):
    from andon.cli import main

    (tmp_path / "permit.json").write_text(json.dumps(issued(K[2], TIMES[2])))
    (tmp_path / "keys.json").write_text(json.dumps(ROTATED))
    words = ["permit", "verify", str(tmp_path / "permit.json"), "--at", "2026-03-01T01:00:00Z"]
    pinned = ["--key", K[0].key_id]
    assert main([*words, *pinned]) == 1
    assert main([*words, *pinned, "--keys", str(tmp_path / "keys.json")]) == 0
    assert main([*words, "--keys", str(tmp_path / "keys.json")]) == 2
    assert main([*words, *pinned, "--keys", str(tmp_path / "absent")]) == 2
    assert main([*words, "--key", STRANGER.key_id, "--keys", str(tmp_path / "keys.json")]) == 1
    capsys.readouterr()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(
    st.one_of(_JSON, st.fixed_dictionaries({"keys": st.lists(st.fixed_dictionaries({"handover": _JSON}))}))
)
def test_what_is_no_key_document_widens_nothing(document):
    assert set(keys.follow(document, {K[0].key_id})) == {K[0].key_id}
