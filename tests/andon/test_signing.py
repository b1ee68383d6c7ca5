"""Signed posts, documents and envelopes."""

import base64
import json
import os
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook

from andon import signing
from andon.signing import SignatureError, SigningKey

NOW_S = 1_767_323_045
BODY = b'{"type": "step", "step": 1}'


def signed(secret: str, *, webhook_id: str = "msg_1", at: int = NOW_S, body: bytes = BODY):
    return webhook_id, str(at), signing.sign_webhook(secret, webhook_id, at, body)


class TestWebhookSignature:
    def test_it_takes_what_it_signed(self):
        secret = signing.new_secret()
        signing.verify_webhook([secret], *signed(secret), BODY, NOW_S)

    def test_the_reference_library_takes_what_we_sign(self):
        secret, now_s = signing.new_secret(), int(time.time())
        webhook_id, timestamp, signature = signed(secret, at=now_s)
        headers = {"webhook-id": webhook_id, "webhook-timestamp": timestamp, "webhook-signature": signature}
        assert Webhook(secret).verify(BODY.decode(), headers) == json.loads(BODY)

    def test_we_take_what_the_reference_library_signs(self):
        secret, now = signing.new_secret(), datetime.now(UTC)
        signature = Webhook(secret).sign("msg_2", now, BODY.decode())
        timestamp = str(int(now.timestamp()))
        signing.verify_webhook([secret], "msg_2", timestamp, signature, BODY, now.timestamp())

    def test_any_secret_that_is_valid_during_rotation_will_do(self):
        old, new = signing.new_secret(), signing.new_secret()
        for secret in (old, new):
            signing.verify_webhook([new, old], *signed(secret), BODY, NOW_S)

    def test_any_entry_of_the_list_will_do_and_other_versions_are_passed_over(self):
        secret = signing.new_secret()
        webhook_id, timestamp, good = signed(secret)
        header = f"v1a,{'A' * 88} v1,{'A' * 43}= v1,*** nonsense {good}"
        signing.verify_webhook([secret], webhook_id, timestamp, header, BODY, NOW_S)

    @pytest.mark.parametrize("shift_s", [-300, 300])
    def test_it_takes_a_timestamp_at_the_edge_of_the_tolerance(self, shift_s):
        secret = signing.new_secret()
        signing.verify_webhook([secret], *signed(secret), BODY, NOW_S + shift_s)

    @pytest.mark.parametrize("shift_s", [-301, 301])
    def test_a_right_signature_with_a_wrong_time_says_that_it_is_only_the_time(self, shift_s):
        secret = signing.new_secret()
        with pytest.raises(SignatureError) as raised:
            signing.verify_webhook([secret], *signed(secret), BODY, NOW_S + shift_s)
        assert raised.value.timestamp_only

    def test_a_wrong_signature_with_a_wrong_time_does_not_say_so(self):
        secret = signing.new_secret()
        with pytest.raises(SignatureError) as raised:
            signing.verify_webhook([signing.new_secret()], *signed(secret), BODY, NOW_S + 999)
        assert not raised.value.timestamp_only

    def test_it_refuses_another_body_id_or_time(self):
        secret = signing.new_secret()
        webhook_id, timestamp, signature = signed(secret)
        for case in (
            (webhook_id, timestamp, signature, BODY + b" "),
            ("msg_other", timestamp, signature, BODY),
            (webhook_id, str(NOW_S + 1), signature, BODY),
        ):
            with pytest.raises(SignatureError):
                signing.verify_webhook([secret], *case, NOW_S)

    def test_the_dot_cannot_be_moved_from_the_id_into_the_time(self):
        secret = signing.new_secret()
        with pytest.raises(SignatureError, match="webhook-id"):
            signing.sign_webhook(secret, "a.1", NOW_S, BODY)

    @pytest.mark.parametrize(
        "timestamp", ["1e9", "1767323045.5", " 1767323045", "+1767323045", "١٢٣", "-1", "9" * 13]
    )
    def test_it_takes_digits_only_as_timestamp(self, timestamp):
        secret = signing.new_secret()
        with pytest.raises(SignatureError, match="webhook-timestamp"):
            signing.verify_webhook([secret], "msg_1", timestamp, "v1,AAAA", BODY, NOW_S)

    @pytest.mark.parametrize("missing", [0, 1, 2])
    def test_it_names_a_missing_header(self, missing):
        secret = signing.new_secret()
        headers: list[str | None] = list(signed(secret))
        headers[missing] = None
        name = ("webhook-id", "webhook-timestamp", "webhook-signature")[missing]
        with pytest.raises(SignatureError, match=name):
            signing.verify_webhook([secret], *headers, BODY, NOW_S)

    def test_no_secret_verifies_nothing(self):
        secret = signing.new_secret()
        with pytest.raises(SignatureError):
            signing.verify_webhook([], *signed(secret), BODY, NOW_S)

    def test_a_broken_secret_in_the_list_does_not_hide_the_good_one(self):
        secret = signing.new_secret()
        signing.verify_webhook(["whsec_***", "whsec_", secret], *signed(secret), BODY, NOW_S)

    @given(st.text(max_size=80), st.text(max_size=20), st.text(max_size=300), st.binary(max_size=50))
    def test_no_header_makes_anything_but_a_signature_error(self, webhook_id, timestamp, signature, body):
        for stamp in (timestamp, str(NOW_S)):
            with pytest.raises(SignatureError):
                signing.verify_webhook(["whsec_" + "A" * 32], webhook_id, stamp, signature, body, NOW_S)


class TestSignedGet:
    def test_it_covers_method_path_and_query(self):
        secret = signing.new_secret()
        path = "/api/v1/runs/a/directive?after=1&wait=2"
        signature = signing.sign_get(secret, "g1", NOW_S, "GET", path)
        signing.verify_get([secret], "g1", str(NOW_S), signature, "GET", path, NOW_S)
        for method, other in (("GET", path.replace("after=1", "after=2")), ("DELETE", path)):
            with pytest.raises(SignatureError):
                signing.verify_get([secret], "g1", str(NOW_S), signature, method, other, NOW_S)


_MAKE = (
    "import sys; from andon.signing import SigningKey; print(SigningKey.load_or_create(sys.argv[1]).key_id)"
)


class TestKeyFile:
    def test_it_is_made_once_and_only_its_owner_may_read_it(self, tmp_path):
        path = tmp_path / "deep" / "key.pem"
        first = SigningKey.load_or_create(path)
        assert SigningKey.load_or_create(path).key_id == first.key_id
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----")
        assert os.listdir(path.parent) == ["key.pem"]

    def test_processes_that_start_together_agree(self, tmp_path):
        path = tmp_path / "key.pem"
        command = [sys.executable, "-c", _MAKE, str(path)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        names = {process.communicate(timeout=60)[0].strip() for process in started}
        assert names == {SigningKey.load(path).key_id}

    @pytest.mark.parametrize(
        "content", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
    )
    def test_a_file_without_a_key_is_said_and_not_replaced(self, tmp_path, content):
        path = tmp_path / "key.pem"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"key\.pem"):
            SigningKey.load_or_create(path)
        assert path.read_bytes() == content


DOCUMENT = {"run": "a", "seq": 3, "nested": {"b": [1, 2.5, None], "ü": "é"}}


class TestSignedDocument:
    def test_it_verifies_with_and_without_a_pinned_key(self):
        key = SigningKey.generate()
        document = json.loads(json.dumps(signing.sign_document(DOCUMENT, key)))
        assert signing.verify_document(document, {key.key_id}) == DOCUMENT
        assert signing.verify_document(document, None) == DOCUMENT

    def test_another_key_is_not_trusted(self):
        document = signing.sign_document(DOCUMENT, SigningKey.generate())
        with pytest.raises(SignatureError, match="not a trusted key"):
            signing.verify_document(document, {SigningKey.generate().key_id})
        with pytest.raises(SignatureError):
            signing.verify_document(document, set())

    def test_every_change_is_noticed(self):
        key, other = SigningKey.generate(), SigningKey.generate()
        document = signing.sign_document(DOCUMENT, key)
        replaced = signing.sign_document(DOCUMENT, other)
        for change in (
            {"seq": 4},
            {"added": 1},
            {"nested": {}},
            {"key_id": other.key_id},
            {"public_key": replaced["public_key"]},
            {"signature": replaced["signature"]},
            {"signature": document["signature"].rstrip("=")},
            {"signature": None},
            {"seq": float("nan")},
            {"seq": 2**60},
            {"run": "\ud800"},
        ):
            with pytest.raises(SignatureError):
                signing.verify_document({**document, **change}, None)

    def test_a_base64_text_with_another_spelling_is_refused(self):
        key = SigningKey.generate()
        document = signing.sign_document(DOCUMENT, key)
        text = document["signature"]  # 64 bytes: the last character before == has four unused bits
        other = text[:-3] + chr(ord(text[-3]) + 1) + "=="
        assert base64.b64decode(other) == base64.b64decode(text)
        with pytest.raises(SignatureError, match="canonical"):
            signing.verify_document({**document, "signature": other}, None)

    def test_what_has_no_canonical_form_is_not_signed(self):
        with pytest.raises(ValueError, match="canonical"):
            signing.sign_document({"time_ns": 2**60}, SigningKey.generate())

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        )
    )
    def test_no_document_makes_anything_but_a_signature_error(self, value):
        with pytest.raises(SignatureError):
            signing.verify_document(value, None)
        with pytest.raises(SignatureError):
            signing.open_envelope(value, None)


class TestEnvelope:
    def test_the_encoding_is_the_one_of_the_specification(self):
        encoded = signing.pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
        assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"

    def test_it_opens_to_the_same_bytes(self):
        key = SigningKey.generate()
        payload = b'{"a" :  1}\n'
        envelope = json.loads(json.dumps(signing.seal_envelope("application/vnd.in-toto+json", payload, key)))
        assert signing.open_envelope(envelope, {key.key_id}) == payload
        with pytest.raises(SignatureError):
            signing.open_envelope(envelope, {SigningKey.generate().key_id})

    def test_payload_and_type_are_both_signed(self):
        key = SigningKey.generate()
        envelope = signing.seal_envelope("a", b"payload", key)
        for change in (
            {"payload": base64.b64encode(b"Payload").decode()},
            {"payloadType": "b"},
            {"signatures": []},
        ):
            with pytest.raises(SignatureError):
                signing.open_envelope({**envelope, **change}, None)


def test_the_fingerprint_is_the_sha256_of_the_raw_public_key(tmp_path: Path):
    path = tmp_path / "key.pem"
    key = SigningKey.load_or_create(path)
    shown = subprocess.run(
        f"openssl pkey -in {path} -pubout -outform DER | tail -c 32 | sha256sum",
        shell=True,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split()[0] == key.key_id
