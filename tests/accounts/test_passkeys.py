"""Passkeys in a real browser with a virtual authenticator: add one, sign in by it, approve by it."""

import json
from pathlib import Path

import pytest
from allauth.mfa.models import Authenticator
from axe_playwright_python.base import AXE_SCRIPT

from incidents.models import Incident
from runs.models import AccountEvent
from tests.pages import seed
from tests.pages.conftest import _collected, browser, open_page  # noqa: F401
from tests.pages.test_axe import EVERYTHING, PAGE, RUN
from tests.pages.window import CHROMIUM, sign_in, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="not run: needs chromium (apt-packages.txt)"),
]
K = AccountEvent.Kind


@pytest.fixture(autouse=True)
def _host(settings, live_server):
    """A passkey belongs to a host: the one of the test's server."""
    settings.PUBLIC_HOST = live_server.url.split("/")[2].partition(":")[0]


def authenticator(page, *, verifies=True):
    """Give a window a device with passkeys (CDP WebAuthn), whose owner is there; returns how to change it."""
    session = page.context.new_cdp_session(page)
    session.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2",
        "transport": "internal",
        "hasResidentKey": True,
        "hasUserVerification": True,
        "isUserVerified": verifies,
        "automaticPresenceSimulation": True,
    }
    made = session.send("WebAuthn.addVirtualAuthenticator", {"options": options})["authenticatorId"]

    def change(method, **more):
        return session.send(f"WebAuthn.{method}", {"authenticatorId": made, **more})

    return change


def add(page, base):
    page.goto(f"{base}/account/passkeys/add")
    page.fill("#pk-name", "test device")
    page.keyboard.press("Enter")
    page.wait_for_url("**/account/recovery-codes")


def test_add_sign_in_and_approve(open_page, live_server, alice, bob, incident):  # noqa: F811
    base = live_server.url
    page = open_page("alice", "/account")
    device = authenticator(page)
    add(page, base)
    assert page.locator("ol.codes li").count() == 10
    row = Authenticator.objects.get(user=alice, type="webauthn")
    assert row.wrap().name == "test device"
    assert row.wrap().is_passwordless
    page.goto(f"{base}/account")
    assert "test device" in page.inner_text("main")

    # Out, and in again with nothing typed; next is kept.
    page.context.clear_cookies()
    page.goto(f"{base}/sign-in?next=/incidents/{incident.id}/approve")
    page.click("[data-passkey-button]")
    page.wait_for_url(f"{base}/incidents/{incident.id}/approve")
    assert AccountEvent.objects.filter(kind=K.SIGN_IN).latest("id").data == {"method": "passkey"}

    # Approve by a touch: the proof is on the very request.
    seed.ask_to_resume(incident.row, "bob")
    page.reload()
    page.click("button[form=approve-form]")
    page.wait_for_url("**done=approved")
    assert "Approved by alice" in page.inner_text("main")
    assert Incident.objects.get(pk=incident.id).state == "approved"
    proof = AccountEvent.objects.get(kind=K.PROOF, data__method="passkey")
    assert proof.data["at"] == f"/incidents/{incident.id}/approve"

    # A password alone does not sign in any more: the second step takes the passkey.
    page.context.clear_cookies()
    page.goto(f"{base}/sign-in")
    page.fill("#username", "alice")
    page.fill("#password", "alice-password")
    page.click("button.main")
    page.wait_for_url("**/sign-in/second-step")
    page.click("[data-passkey-button]")
    page.wait_for_url(f"{base}/runs")

    # A device whose owner is not there proves nothing.
    device("setUserVerified", isUserVerified=False)
    page.context.clear_cookies()
    page.goto(f"{base}/sign-in")
    page.click("[data-passkey-button]")
    until(page, "document.querySelector('[data-passkey-says]').textContent.includes('No passkey was used')")


def test_a_signature_counts_once_and_for_one_page(browser, live_server, alice, incident):  # noqa: F811
    """What a browser signed for one page is worth nothing on another, or a second time."""
    base = live_server.url
    page = browser.new_context().new_page()
    sign_in(page, base, "alice")
    authenticator(page)
    add(page, base)
    address = f"/incidents/{incident.id}/approve"
    page.goto(base + address.removesuffix("/approve"))
    sign = """async (target) => {
        const token = document.querySelector('[name=csrfmiddlewaretoken]').value;
        const ask = (where, fields) => fetch(where, {method: 'POST', credentials: 'same-origin',
            body: Object.entries({csrfmiddlewaretoken: token, ...fields}).reduce(
                (form, [name, value]) => (form.set(name, value), form), new FormData())});
        const bytes = text => Uint8Array.from(
            atob(text.replace(/-/g, '+').replace(/_/g, '/')), c => c.charCodeAt(0));
        const text = buffer => btoa(String.fromCharCode(...new Uint8Array(buffer)))
            .replace(/\\+/g, '-').replace(/\\//g, '_').replace(/=+$/, '');
        const { publicKey } = await (await ask('/account/challenge', {for: target})).json();
        publicKey.challenge = bytes(publicKey.challenge);
        for (const one of publicKey.allowCredentials) one.id = bytes(one.id);
        const made = await navigator.credentials.get({ publicKey });
        const response = {};
        for (const name of ['clientDataJSON', 'authenticatorData', 'signature', 'userHandle'])
            if (made.response[name]) response[name] = text(made.response[name]);
        const passkey = JSON.stringify({id: made.id, rawId: text(made.rawId), type: made.type, response,
            clientExtensionResults: {}});
        const press = async (where) => (await ask(where, {digest: '0'.repeat(64), why: 'x', passkey})).status;
        return [press, press].reduce(async (before, one) => [...await before, await one(%s)], []);
    }"""
    # 409 is the proof taken and the request refused: nothing is requested. The second time it is no proof.
    assert page.evaluate(sign % "target", address) == [409, 403]
    other = f"/incidents/{incident.id}/false-alarm"
    assert page.evaluate(sign % json.dumps(address), other) == [403, 403]
    failed = AccountEvent.objects.filter(kind=K.PROOF_FAILED)
    assert [row.data["method"] for row in failed] == ["passkey"] * 3


def test_the_account_is_used_without_a_mouse_and_breaks_no_rule(open_page, live_server, alice, bob):  # noqa: F811
    from tests.pages.test_keyboard import tab_to

    page = open_page("alice", "/account")
    page.context.add_init_script(AXE_SCRIPT)
    base = live_server.url
    page.goto(f"{base}/projects/default/people")
    tab_to(page, "details.act-form summary")
    page.keyboard.press("Enter")
    tab_to(page, "details[open] input[value=viewer]")
    page.keyboard.press("Space")
    tab_to(page, "details[open] button")
    page.keyboard.press("Tab")
    for path in (
        "/account",
        "/account/prove",
        "/account/password",
        "/account/passkeys/add",
        "/account/codes",
        "/account/tokens",
        "/projects/default/people",
        "/projects/default/hooks",
        "/projects/default/secrets",
        "/projects/default/log",
    ):
        page.goto(base + path)
        page.evaluate("document.querySelectorAll('main details').forEach(one => { one.open = true })")
        for theme, width in (("light", 1440), ("dark", 390)):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme=theme)
            assert page.evaluate(RUN, [PAGE, EVERYTHING]) == [], (path, theme, width)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (path, width)
