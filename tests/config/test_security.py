"""What a browser is told: policy, cookies, HSTS, CSRF, as they follow from the public address."""

import json
import os
import subprocess
import sys

import pytest
from django.conf import settings
from django.core.cache import cache
from django.test import Client

from config.cache import Cache
from tests.config.up import ROOT, manage

pytestmark = pytest.mark.django_db

_NAMES = [
    "SESSION_COOKIE_SECURE",
    "CSRF_COOKIE_SECURE",
    "SECURE_SSL_REDIRECT",
    "SECURE_HSTS_SECONDS",
    "SECURE_HSTS_INCLUDE_SUBDOMAINS",
    "SECURE_HSTS_PRELOAD",
    "SECURE_PROXY_SSL_HEADER",
    "SESSION_COOKIE_HTTPONLY",
    "SESSION_COOKIE_SAMESITE",
    "CSRF_COOKIE_SAMESITE",
    "CSRF_TRUSTED_ORIGINS",
    "X_FRAME_OPTIONS",
    "SECURE_REFERRER_POLICY",
    "SECURE_CONTENT_TYPE_NOSNIFF",
    "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN",
    "PUBLIC_HOST",
    "ALLAUTH_TRUSTED_PROXY_COUNT",
    "MFA_WEBAUTHN_USER_VERIFICATION",
    "SIGN_UP",
]
_PRINT = (
    "import json; from django.conf import settings;"
    f"print(json.dumps({{name: getattr(settings, name) for name in {_NAMES!r}}}))"
)


def settings_of(tmp_path, **variables):
    """Return what a server with these variables runs by."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ANDON_", "DJANGO_"))}
    done = subprocess.run(
        [sys.executable, "-c", f"import django; django.setup(); {_PRINT}"],
        cwd=ROOT,
        env={
            **clean,
            "ANDON_DATA_DIR": str(tmp_path),
            "DJANGO_SETTINGS_MODULE": "config.settings",
            **variables,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_public_server_speaks_https_only(tmp_path):
    seen = settings_of(
        tmp_path,
        ANDON_PUBLIC_URL="https://andon.example.org",
        ANDON_SECRET_KEY="k" * 60,
        ANDON_BEHIND_PROXY="1",
    )
    assert all(seen[name] is True for name in _NAMES if name.endswith(("_SECURE", "_REDIRECT", "_PRELOAD")))
    assert seen["SECURE_HSTS_SECONDS"] >= 365 * 86_400
    assert seen["SECURE_HSTS_INCLUDE_SUBDOMAINS"] is True
    assert seen["SESSION_COOKIE_HTTPONLY"] is True
    assert seen["SECURE_CONTENT_TYPE_NOSNIFF"] is True
    assert (seen["SESSION_COOKIE_SAMESITE"], seen["CSRF_COOKIE_SAMESITE"]) == ("Lax", "Lax")
    assert seen["CSRF_TRUSTED_ORIGINS"] == ["https://andon.example.org"]
    assert seen["X_FRAME_OPTIONS"] == "DENY"
    assert seen["SECURE_REFERRER_POLICY"] == "same-origin"
    assert seen["SECURE_PROXY_SSL_HEADER"] == ["HTTP_X_FORWARDED_PROTO", "https"]
    assert seen["ALLAUTH_TRUSTED_PROXY_COUNT"] == 1
    # A passkey is this host's, over https, and its device has checked the person.
    assert seen["PUBLIC_HOST"] == "andon.example.org"
    assert seen["MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN"] is False
    assert seen["MFA_WEBAUTHN_USER_VERIFICATION"] == "required"
    assert seen["SIGN_UP"] == "off"


def test_without_a_proxy_nobodys_word_about_scheme_or_address_is_believed(tmp_path):
    seen = settings_of(tmp_path)
    assert seen["SECURE_PROXY_SSL_HEADER"] is None
    assert seen["ALLAUTH_TRUSTED_PROXY_COUNT"] == 0
    assert seen["SECURE_HSTS_SECONDS"] == 0  # a laptop's localhost must not be locked to https for a year


@pytest.mark.parametrize(
    "address", ["/sign-in", "/account", "/runs", "/account/tokens", "/projects/default/people"]
)
def test_no_page_runs_or_sends_anything_elsewhere(alice, address):
    client = Client()
    client.post("/sign-in", {"username": "alice", "password": "alice-password"})
    if address == "/sign-in":
        client = Client()
    answer = client.get(address)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["form-action"] == policy["connect-src"] == "'self'"
    assert policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    html = answer.content.decode()
    assert "<style" not in html
    assert " style=" not in html
    assert all(" src=" in tag for tag in html.split("<script")[1:])
    assert answer["X-Frame-Options"] == "DENY"
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert answer["Referrer-Policy"] == "same-origin"


def test_the_session_is_kept_from_scripts_and_new_after_signing_in(alice):
    client = Client()
    client.post("/sign-in/challenge")  # a session before anybody signed in
    before = client.cookies["sessionid"].value
    client.post("/sign-in", {"username": "alice", "password": "alice-password"})
    cookie = client.cookies["sessionid"]
    assert cookie["httponly"]
    assert cookie["samesite"] == "Lax"
    assert cookie.value != before


def test_no_form_works_without_its_token(alice):
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)
    for address in (
        "/sign-in",
        "/sign-in/passkey",
        "/account/prove",
        "/account/tokens",
        "/projects/default/people",
    ):
        assert client.post(address, {"username": "alice", "password": "alice-password"}).status_code == 403


class TestOidc:
    GIVEN = {
        "ANDON_OIDC_ISSUER": "https://id.example.org/realms/acme",
        "ANDON_OIDC_CLIENT_ID": "andon",
        "ANDON_OIDC_CLIENT_SECRET": "s3cret-value",
    }

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"ANDON_OIDC_CLIENT_SECRET": ""}, "ANDON_OIDC_CLIENT_SECRET not set"),
            ({"ANDON_OIDC_ISSUER": ""}, "ANDON_OIDC_ISSUER not set"),
            ({"ANDON_OIDC_ISSUER": "http://id.example.org"}, "expected https://HOST"),
            ({"ANDON_OIDC_SCOPES": "profile"}, "openid is missing"),
            ({"ANDON_OIDC_ISUER": "x"}, "did you mean ANDON_OIDC_ISSUER?"),
            ({"ANDON_SIGN_UP": "all"}, "expected one of off, sso"),
        ],
    )
    def test_half_a_provider_stops_the_start_with_its_reason_and_no_secret(self, tmp_path, change, says):
        result = manage("check", ANDON_DATA_DIR=str(tmp_path), **self.GIVEN | change)
        assert result.returncode != 0
        assert says in result.stdout
        assert "s3cret" not in result.stdout

    def test_the_secret_comes_from_a_file(self, tmp_path):
        (tmp_path / "secret").write_text("s3cret-value\n")
        given = {name: value for name, value in self.GIVEN.items() if not name.endswith("SECRET")}
        result = manage(
            "check",
            ANDON_DATA_DIR=str(tmp_path),
            ANDON_SIGN_UP="sso",
            ANDON_OIDC_CLIENT_SECRET_FILE=str(tmp_path / "secret"),
            **given,
        )
        assert result.returncode == 0, result.stdout


class TestWithoutTheBroker:
    """Counters of sign-in live in Valkey; without it each process counts alone, and nobody is kept out."""

    @pytest.fixture
    def gone(self):
        return Cache("redis://127.0.0.1:9/0", {"KEY_PREFIX": "andon-gone"})

    def test_it_counts_by_itself(self, gone):
        assert gone.add("a", 1, 60)
        assert not gone.add("a", 2, 60)
        gone.set("b", [1.0], 60)
        assert gone.get("b") == [1.0]
        gone.delete("b")
        assert gone.get("b", "none") == "none"
        gone.clear()
        assert gone.get("a") is None

    def test_people_sign_in_and_guessing_is_still_braked(self, alice, gone, monkeypatch):
        from runs import throttle

        monkeypatch.setattr(throttle, "cache", gone)
        client = Client()
        for _ in range(5):
            client.post("/sign-in", {"username": "alice", "password": "wrong"})
        pair = {"username": "alice", "password": "alice-password"}
        assert client.post("/sign-in", pair).status_code == 429
        assert Client(REMOTE_ADDR="192.0.2.8").post("/sign-in", pair).status_code == 302

    def test_the_cache_of_the_server_is_the_broker_and_clearing_it_leaves_the_queues(self):
        import redis

        broker = redis.Redis.from_url(settings.BROKER_URL)
        broker.rpush("andon-test-queue", "work")
        cache.set("counter", 1, 60)
        assert (
            Cache(settings.BROKER_URL, {"KEY_PREFIX": settings.CACHES["default"]["KEY_PREFIX"]}).get(
                "counter"
            )
            == 1
        )
        cache.clear()
        assert cache.get("counter") is None
        assert broker.lrange("andon-test-queue", 0, -1) == [b"work"]
        broker.delete("andon-test-queue")
