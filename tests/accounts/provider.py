"""A small OIDC provider on loopback (OpenID Connect 1.0): discovery, code with PKCE, token, userinfo.

It stands for somebody else's program, and checks what a real one checks: client, secret, redirect, verifier.
"""

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

CLIENT_ID, CLIENT_SECRET = "andon", "a-client-secret"


class Provider:
    """Who signs in next, and what was asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.subject, self.name = "4711", "mira.k"
        self.codes: dict[str, dict[str, str]] = {}
        self.claims: dict[str, Any] = {}  # further ones
        self.down = False

    def authorize(self, address: str) -> str:
        """Do what a browser and a person do at the provider; return where it sends them back to."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert asked["client_id"] == CLIENT_ID
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(8)
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"


class _Handler(BaseHTTPRequestHandler):
    provider: Provider

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, document: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(503 if self.provider.down else status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        url = self.provider.url
        if self.path == "/.well-known/openid-configuration":
            self._answer(
                {
                    "issuer": url,
                    "authorization_endpoint": f"{url}/authorize",
                    "token_endpoint": f"{url}/token",
                    "userinfo_endpoint": f"{url}/userinfo",
                    "jwks_uri": f"{url}/jwks",
                    "token_endpoint_auth_methods_supported": ["client_secret_post"],
                }
            )
        elif self.path == "/userinfo" and self.headers["Authorization"] == "Bearer an-access-token":
            self._answer(
                {
                    "sub": self.provider.subject,
                    "preferred_username": self.provider.name,
                    "email": "mira@example.org",
                    "email_verified": True,
                    **self.provider.claims,
                }
            )
        else:
            self._answer({"error": "unknown"}, 404)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        given = {name: values[0] for name, values in parse_qs(self.rfile.read(length).decode()).items()}
        asked = self.provider.codes.pop(given.get("code", ""), None)
        digest = hashlib.sha256(given.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        right = (
            asked is not None
            and (given["client_id"], given["client_secret"]) == (CLIENT_ID, CLIENT_SECRET)
            and given["redirect_uri"] == asked["redirect_uri"]
            and challenge == asked["code_challenge"]
        )
        if right:
            self._answer({"access_token": "an-access-token", "token_type": "Bearer", "expires_in": 60})
        else:
            self._answer({"error": "invalid_grant"}, 400)


@contextmanager
def provider() -> Iterator[Provider]:
    """Start a provider on a free port of loopback; it stops at the end."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    made = Provider(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"provider": made})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
