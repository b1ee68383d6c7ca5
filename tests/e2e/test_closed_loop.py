"""What two people do about a run that went bad, in a real browser, on both vaults."""

import os
from functools import partial
from pathlib import Path

import boto3
import pytest
from playwright.sync_api import Browser, expect

from andon.recording import Recording
from demo.__main__ import APPROVER, QUIET, RECORDING, REQUESTER, RUN, Demo, told_to_hold
from demo.answers import derive
from demo.check import Checker, until
from tests.e2e.conftest import SomebodySitting, supervise

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("e2e")]
SOON_MS = 90_000


@pytest.mark.parametrize("vault", ["directory", "s3"], indirect=True)
def test_a_nan_on_one_rank_is_held_sealed_approved_and_rolled_back(
    demo: Demo, browser: Browser, vault: dict[str, str]
):
    trainer = demo.launch()
    supervisor, permit = supervise(demo, trainer)
    token = demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
    checker = Checker(demo.server, RUN, token, trainer.answer)
    assert (trainer.answer["step"], trainer.answer["ranks"]) == (120, [3])
    incident = checker.first_bad_is_right()
    address = f"/incidents/{incident['id']}"
    checker.evidence_is_sealed()

    # One person finds the answer and asks.
    mira = SomebodySitting(browser, demo, REQUESTER, 1440, 900)
    page = mira.sign_in(f"/runs/{RUN}")
    expect(page.locator("main")).to_contain_text("Held", timeout=SOON_MS)
    page = mira.open(address)
    expect(page.locator(".answers")).to_contain_text("rank 3 on node-01, step 120, forward")
    expect(page.locator(".answers")).to_contain_text("layers.2.attn.wo")
    expect(page.locator(".answers")).to_contain_text("4 of 4 ranks obey")
    expect(page.locator(".js-plotly-plot, .plotly").first).to_be_visible()
    expect(page.locator("body")).to_contain_text("first bad: rank 3")
    page.get_by_role("button", name="Acknowledge").first.click()
    page.fill("input[name=note]", "corrupt sample")
    page.locator("form[action$='/request'] button").click()
    expect(page.locator("body")).to_contain_text(APPROVER)
    page = mira.open(address + "/approve")
    assert page.locator("#approve-form").count() == 0
    expect(page.locator("main")).to_contain_text("Approver: ")

    # Another approves, on a phone, and has to prove who he is.
    jonas = SomebodySitting(browser, demo, APPROVER, 390, 844)
    page = jonas.sign_in(address + "/approve")
    page.fill("#approve-form input[name=password]", "not my password")
    page.press("#approve-form input[name=password]", "Enter")
    page.wait_for_load_state()
    assert checker.incident()["state"] == "open"
    page = jonas.open(address + "/approve")
    page.fill("#approve-form input[name=password]", jonas.password)
    page.press("#approve-form input[name=password]", "Enter")
    expect(page.locator("body")).to_contain_text("Approved", timeout=SOON_MS)

    # The supervisor takes the permit, checks it offline, and the run goes on by the plan.
    supervisor.join(60)
    assert permit["checkpoint"]["step"] == trainer.answer["last_good_step"]
    assert permit["skip"] == trainer.answer["skip"]
    until("the next attempt ends", lambda: trainer.ended_well() is not None, 120)
    assert trainer.ended_well()
    checker.ledger_shows_the_rollback(trainer.answer["last_good_step"])
    page = mira.open(f"/runs/{RUN}/ledger")
    expect(page.locator("main")).to_contain_text("rollback")
    assert mira.complaints == []
    if vault:
        everything_is_locked(vault)


def everything_is_locked(vault: dict[str, str]) -> None:
    """Every stored checkpoint version carries what Object Lock promises, read back by version."""
    endpoint = vault["ANDON_VAULT_URL"].split("endpoint=")[1].split("&")[0]
    bucket = vault["ANDON_VAULT_URL"].removeprefix("s3://").split("?")[0]
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
    )
    heads = [
        client.head_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])
        for version in client.list_object_versions(Bucket=bucket)["Versions"]
        if "probe" not in version["Key"]
    ]
    locked = [head for head in heads if head.get("ObjectLockMode") == "GOVERNANCE"]
    assert len(locked) >= 9  # the files of the last good checkpoint at least
    assert all(head.get("ObjectLockLegalHoldStatus") == "ON" for head in locked)


@pytest.mark.parametrize("vault", ["directory"], indirect=True)
def test_a_spike_without_a_nan_holds_only_when_the_rule_acts(demo: Demo, vault: dict[str, str]):
    """The same spike into two runs: only a finding where the rule observes, a hold where it acts."""
    token = demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
    runs = {mode: demo.launch_quiet(mode) for mode in ("observe", "act")}
    trainers = dict(zip(runs, demo.trainers, strict=True))
    checkers = {mode: Checker(demo.server, run, token, trainers[mode].answer) for mode, run in runs.items()}
    for mode, checker in checkers.items():
        until("the spike is found", partial(checker.spike_is_found, mode), 120)
    until("the run is held", lambda: told_to_hold(checkers["act"]), 60)
    until("the run ends", lambda: trainers["observe"].ended_well() is not None, 120)
    assert trainers["observe"].ended_well()
    assert checkers["observe"].incident() is None


@pytest.mark.parametrize("path", [RECORDING, QUIET], ids=lambda path: Path(path).stem)
def test_the_recordings_answer_is_found_again_from_its_posts(path: Path):
    with Recording(path) as recording:
        answer = recording.description.answer
        found = derive(recording)
        assert {name: answer.get(name) for name in found} == found
