"""What people and machines may not do, tried from outside against a run that is really held."""

import http.client
import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from andon import hold
from andon.client import AnswerError, Client
from andon.permit import PermitError, verify
from demo.__main__ import APPROVER, RECORDING, REQUESTER, RUN, Demo
from demo.check import Checker
from demo.people import Person
from demo.server import REPOSITORY
from demo.trainers import RecordedTrainer
from tests.access.declared import PAGES, Access, To
from tests.faults.demos import all_obey, eventually, inside, sealed, started
from tests.faults.house import Reply, exchange

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.timeout(240)]

# Who may open what is declared in one place; here the same is tried on a real server.
OPEN = {To.ANYONE, To.SIGNED_IN}


@dataclass
class Held:
    """A demo whose run is held with all evidence sealed, and who is who."""

    demo: Demo
    trainer: RecordedTrainer
    checker: Checker
    incident: str
    port: int

    def person(self, name: str) -> Person:
        one = Person(self.demo.server.url, name, self.demo.passwords[name])
        one.sign_in()
        return one

    def state(self) -> str:
        return str(self.checker.incident()["state"])

    def kind(self) -> str:
        return str(self.checker.incident()["directive"]["kind"])


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    with started(tmp_path_factory.mktemp("held") / "d") as demo:
        trainer = demo.launch()
        assert isinstance(trainer, RecordedTrainer)
        made = (
            "from runs.models import Person; from runs.actions import create_token;"
            "p = Person.objects.create_user('charlie', password='charlie-password');"
            "print(create_token(person=p, name='test'))"
        )
        demo.passwords["charlie"] = "charlie-password"
        demo.charlies_token = (  # type: ignore[attr-defined]
            demo.server.manage("shell", "-v0", "-c", made).strip().splitlines()[-1]
        )
        token = demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
        checker = Checker(demo.server, RUN, token, trainer.answer)
        eventually("an incident", checker.incident)
        eventually("sealed", lambda: sealed(checker.incident()["evidence"]))
        eventually("all obey", lambda: all_obey(checker))
        yield Held(demo, trainer, checker, str(checker.incident()["id"]), inside(demo).port)


def addresses(held: Held) -> dict[str, Access]:
    """Return every page address of the URL map, with the held run's own names in it, and whose it is."""
    house = inside(held.demo)
    dossier = str(house.one("SELECT id FROM evidence_dossier"))
    node = str(house.one("SELECT min(node) FROM runs_nodestay"))
    values = {
        "slug": RUN,
        "incident_id": held.incident,
        "dossier_id": dossier,
        "item_id": str(house.one("SELECT min(id) FROM evidence_item")),
        "object_id": str(house.one("SELECT min(id) FROM evidence_storedobject")),
        "sha256": str(house.one("SELECT min(sha256) FROM evidence_storedobject")),
        "name": "evidence",
        "node": node,
        "page_id": str(house.one("SELECT min(id) FROM incidents_page")),
        "token": "nonsense",
        "key": "nonsense",
        "rule": "spike",
        "standing_id": "1",
        "project": "default",
        "provider_id": "sso",
        "passkey_id": "1",
    }
    return {
        re.sub(r"<(?:\w+:)?(\w+)>", lambda match: values[match[1]], route): access
        for route, access in PAGES.items()
        if not route.startswith(".well-known")
    }


class TestCharlie:
    """Signed in, and a member of nothing."""

    def test_no_page_shows_anything_of_the_run(self, held: Held):
        charlie = held.person("charlie")
        for address, access in addresses(held).items():
            page = charlie.get(f"/{address}")
            if access.see in OPEN:
                assert page.status == 200, address
            else:
                # 405 for what is only posted to tells nothing: it is the same for any name.
                assert page.status in {404, 405}, (address, page.status)
                # What is said of something that does not exist, but for the name that was asked for.
                nothing = address.replace(RUN, "no-such").replace(f"/{held.incident}", "/987654321")
                assert told(page.text) == told(charlie.get(f"/{nothing}").text), address
                continue
            assert RUN not in page.html, address
            assert f"/incidents/{held.incident}" not in page.html, address

    def test_no_button_does_anything(self, held: Held):
        charlie = held.person("charlie")
        form = next(one for one in charlie.get("/runs").parsed().forms if "csrfmiddlewaretoken" in one.fields)
        for address, access in addresses(held).items():
            if access.do in OPEN:
                continue
            answer = post(charlie, f"/{address}", {**form.fields, "why": "x", "password": charlie.password})
            assert answer.status in {404, 405}, (address, answer.status)
        assert (held.state(), held.kind()) == ("open", "hold")

    def test_the_api_knows_nothing_of_it_either(self, held: Held):
        token = {"authorization": f"Bearer {held.demo.charlies_token}"}  # type: ignore[attr-defined]

        def ask(path: str, headers: dict[str, str]) -> Reply:
            return exchange(held.port, "GET", f"/api/v1{path}", headers=headers)

        for path in (f"/incidents/{held.incident}", f"/runs/{RUN}/ledger", f"/runs/{RUN}/findings"):
            assert ask(path, token).status == 404, path
            assert ask(path, {}).status == 401, path
            assert ask(path, {"authorization": "Bearer nonsense"}).status == 401, path
        for path in ("/runs", "/incidents", f"/incidents?run={RUN}"):
            answer = ask(path, token)
            assert answer.status in {200, 404}
            assert RUN not in json.dumps(answer.document.get("items", []))
            assert ask(path, {}).status == 401


def told(text: str) -> str:
    """Return a page's words without the clock in its frame."""
    return re.sub(r"\d\d:\d\d:\d\d UTC", "", text)


def test_a_visitor_is_sent_to_sign_in(held: Held):
    for address, access in addresses(held).items():
        answer = exchange(held.port, "GET", f"/{address}")
        # The link of a page needs no sign-in; a token that is none of ours is nothing.
        allowed = {None: {302, 405}, To.ANYONE: {200, 302}, To.KEY_HOLDERS: {302, 404}}.get(access.see, {302})
        assert answer.status in allowed, (address, answer.status)
        assert RUN not in str(answer.document)


def test_without_csrf_nothing_is_done(held: Held):
    mira = held.person(REQUESTER)
    cookies = cookies_of(mira)
    body = urllib.parse.urlencode({"why": "x", "digest": "x"}).encode()
    for action in (
        "acknowledge",
        "plan",
        "request",
        "approve",
        "reject",
        "false-alarm",
        "break-glass",
        "resolve",
        "notes",
    ):
        headers = {"cookie": cookies, "content-type": "application/x-www-form-urlencoded"}
        answer = exchange(
            held.port, "POST", f"/incidents/{held.incident}/{action}", body=body, headers=headers
        )
        assert answer.status == 403, action
    assert exchange(held.port, "POST", f"/runs/{RUN}/hold", body=body, headers=headers).status == 403
    assert held.state() == "open"


def test_from_request_to_permit_only_the_right_person_and_the_right_words_count(held: Held, tmp_path: Path):
    mira, jonas = held.person(REQUESTER), held.person(APPROVER)
    here, there = f"/incidents/{held.incident}", f"/incidents/{held.incident}/approve"
    assert mira.submit(mira.get(here), "/request", note="").status == 200

    # A responder has no button, and posting straight at the address does not help.
    shown = jonas.get(there).form("/approve").fields
    token = mira.get(here).form("/plan").fields["csrfmiddlewaretoken"]
    forged = {**shown, "csrfmiddlewaretoken": token, "password": mira.password}
    refused = post(mira, there, forged)
    assert refused.status == 403
    assert held.state() == "open"

    # The right person, with a wrong password or another digest.
    for wrong in ({"password": "guess"}, {"password": jonas.password, "digest": "0" * 64}):
        assert post(jonas, there, {**shown, **wrong}).status in {403, 409}
        assert held.state() == "open"

    # The plan changes under the approver's eyes: refused, and told what changed.
    changed = mira.submit(mira.get(here), "/plan", kind="rollback_and_replay", why="try the same data")
    assert changed.status == 200
    stale = post(jonas, there, {**shown, "password": jonas.password})
    assert stale.status == 409
    assert "plan" in stale.text.lower()
    assert "rollback and replay" in stale.text.lower()
    assert (held.state(), held.kind()) == ("open", "hold")

    # Who edited the plan or asked may not approve, even as an approver.
    changed = jonas.submit(jonas.get(here), "/plan", kind="rollback_and_skip", why="back to the rule")
    assert changed.status == 200
    assert mira.submit(mira.get(here), "/request", note="").status == 200
    own = post(jonas, there, {**jonas.get(here).form("/notes").fields, **shown, "password": jonas.password})
    assert own.status in {403, 409}
    assert held.state() == "open"
    olga = approver(held, "olga")
    assert held.checker.approve(olga, held.incident).status == 200
    eventually("approved", lambda: held.state() == "approved")

    # One permit, for one exchange.
    client = Client(held.demo.server.url, RUN, held.demo.secret, spool_dir=tmp_path / "spool")
    try:
        first = client.resume(held.incident, 2, "exchange-one")
        assert client.resume(held.incident, 2, "exchange-one") == first
        with pytest.raises(AnswerError) as again:
            client.resume(held.incident, 2, "exchange-two")
        assert (again.value.status, again.value.type) == (409, "already-exchanged")
    finally:
        client.close()
    late_or_foreign_permits_release_nothing(held, first, tmp_path)


def late_or_foreign_permits_release_nothing(held: Held, document: dict[str, Any], tmp_path: Path) -> None:
    """Past its time, altered, of another key or run: the hold file stays."""
    trusted, directory = held.demo.trusted, held.trainer.checkpoint_dir
    day_s = 86_400
    now = time.time()
    verify(document, trusted=trusted, at=now, run=RUN, attempt=2)
    wrong: list[tuple[dict[str, Any], list[str], float]] = [
        (document, trusted, now + 2 * day_s),
        (document, ["0" * 64], now),
        ({**document, "run": "another-run"}, trusted, now),
        ({**document, "expires_at": "2099-01-01T00:00:00Z"}, trusted, now + 2 * day_s),
    ]
    for permit, keys, at in wrong:
        with pytest.raises((hold.Held, PermitError)):
            hold.release(directory, permit, trusted=keys, at=at, run=RUN)
        assert (directory / hold.FILE_NAME).exists()
    path = tmp_path / "permit.json"
    path.write_bytes(rfc8785.dumps(document))
    andon = str(Path(sys.executable).parent / "andon")
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + 2 * day_s))
    for more, code in ((["--key", trusted[0]], 0), (["--key", trusted[0], "--at", later], 1), ([], 3)):
        done = subprocess.run(
            [andon, "permit", "verify", str(path), *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr


def test_a_held_directory_starts_nothing_with_the_server_down(held: Held):
    assert (held.trainer.checkpoint_dir / hold.FILE_NAME).exists()
    root = held.trainer.checkpoint_dir.parent
    away = "http://127.0.0.1:9"
    andon = str(Path(sys.executable).parent / "andon")
    whsec = held.demo.secret
    replay = [andon, "replay", str(RECORDING), "--url", away, "--run", RUN, "--secret", whsec]
    for command in (
        [*replay, "--checkpoint-dir", str(root)],
        [sys.executable, "-m", "demo.train", "--dir", str(root), "--run", RUN],
    ):
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == hold.EXIT_HELD, done.stdout + done.stderr
        assert "held" in done.stderr


def test_its_log_and_files_tell_no_secret_and_are_nobody_elses(held: Held):
    said = held.demo.server.log.read_text("utf-8")
    logs = [said, *(path.read_text(errors="replace") for path in (held.demo.data_dir / "log").glob("*.log"))]
    secrets = [held.demo.secret.removeprefix("whsec_"), *held.demo.passwords.values()]
    secrets += [path.read_text().strip() for path in (held.demo.data_dir / "secrets").iterdir()]
    for text in logs:
        assert "whsec_" not in text
        for secret in secrets:
            assert secret not in text
    # The trainer's own directory is the trainer's; all else is the server's alone.
    open_to_others = [
        path
        for path in held.demo.data_dir.rglob("*")
        if not path.is_symlink()
        and held.demo.trainer_dir not in path.parents
        and path.stat().st_mode & 0o077
        and not any(parent.stat().st_mode & 0o077 == 0 for parent in path.parents if parent != Path("/"))
    ]
    assert open_to_others == []
    assert held.demo.data_dir.stat().st_mode & 0o777 == 0o700


def approver(held: Held, name: str) -> Person:
    made = held.demo.server.manage_json("create_person", name, "--role", "approver")
    held.demo.passwords[name] = str(made["password"])
    return held.person(name)


def cookies_of(person: Person) -> str:
    jar = next(
        one.cookiejar
        for one in person._opener.handlers  # type: ignore[attr-defined]
        if isinstance(one, urllib.request.HTTPCookieProcessor)
    )
    return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)


def post(person: Person, address: str, fields: dict[str, str]) -> Any:
    """Post fields straight at an address, with the person's own session."""
    import urllib.request

    request = urllib.request.Request(
        person.base_url + address, data=urllib.parse.urlencode(fields).encode(), method="POST"
    )
    request.add_header("Referer", person.base_url + address)
    try:
        return person._open(request)
    except http.client.HTTPException as error:
        raise AssertionError(f"{address}: {error}") from error
