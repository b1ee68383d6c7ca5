"""What fleets post by a hook token: read as their tools send it, kept once, shown, and holding nothing."""

import base64
import contextlib
import json
import logging
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from andon.readers import hooks as readers
from andon.wire_values import WireError
from runs import hooks
from runs.hook_masking import MaskHookTokens
from runs.models import FleetReport, HookToken, Project

ALERTMANAGER: dict[str, Any] = {
    "version": "4",
    "groupKey": '{}:{alertname="GpuFellOff"}',
    "status": "firing",
    "receiver": "andon",
    "alerts": [
        {
            "status": "firing",
            "labels": {
                "alertname": "GpuFellOff",
                "severity": "critical",
                "instance": "node-01:9400",
                "gpu": "3",
            },
            "annotations": {"summary": "Xid 79 on node-01", "description": "GPU 3 has fallen off the bus"},
            "startsAt": "2026-11-30T03:12:07.412Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "http://prometheus/graph",
            "fingerprint": "8d2f0c7b1a5e4f39",
        }
    ],
}
NVRX = {
    "key": "job-7/restart_storm",
    "detector": "restart_storm",
    "severity": "critical",
    "summary": "6 cycles in 30 min",
    "detail": "job 7",
    "text": "restart storm",
}
NVSENTINEL = {
    "version": 1,
    "agent": "gpu-health-monitor",
    "componentClass": "GPU",
    "checkName": "GpuXidError",
    "isFatal": True,
    "isHealthy": False,
    "message": "XID 79",
    "recommendedAction": "RESTART_BM",
    "errorCode": ["79"],
    "entitiesImpacted": [{"entityType": "GPU", "entityValue": "3"}],
    "generatedTimestamp": "2026-11-30T03:12:07Z",
    "nodeName": "node-01",
}
GPUD = {
    "component": "accelerator-nvidia-error-xid",
    "node": "node-01",
    "states": [{"time": "2026-11-30T03:12:07Z", "name": "xid", "health": "Unhealthy", "reason": "xid 79"}],
}
TRACKIO = {
    "level": "warn",
    "title": "Loss is high",
    "text": "loss 9.1",
    "project": "p",
    "run": "pt-13b-web3",
    "step": 12,
    "timestamp": "2026-11-30T03:12:07Z",
}


def one(source, document):
    (report,) = readers.read(source, json.dumps(document).encode())
    return report


class TestBodies:
    @pytest.mark.parametrize(
        ("source", "document", "expected"),
        [
            ("alertmanager", ALERTMANAGER, ("Xid 79 on node-01", "critical", "node-01", "", "firing")),
            ("nvrx-watch", NVRX, ("6 cycles in 30 min", "critical", "", "", "firing")),
            ("nvsentinel", NVSENTINEL, ("GpuXidError 79", "critical", "node-01", "", "firing")),
            (
                "gpud",
                GPUD,
                ("accelerator-nvidia-error-xid xid Unhealthy", "critical", "node-01", "", "firing"),
            ),
            ("trackio", TRACKIO, ("Loss is high", "warn", "", "pt-13b-web3", "firing")),
            (
                "generic",
                {"title": "switch down", "severity": "major", "host": "leaf-3", "status": "resolved"},
                ("switch down", "warn", "leaf-3", "", "resolved"),
            ),
        ],
    )
    def test_each_tools_own_body_is_read(self, source, document, expected):
        report = one(source, document)
        assert (report.title, report.severity, report.node, report.run, report.state) == expected

    def test_an_alert_that_ends_is_the_same_report_and_one_that_returns_is_another(self):
        fired = one("alertmanager", ALERTMANAGER)
        alert = {**ALERTMANAGER["alerts"][0], "status": "resolved", "endsAt": "2026-11-30T03:20:00Z"}
        ended = one("alertmanager", {**ALERTMANAGER, "alerts": [alert]})
        later = one(
            "alertmanager", {**ALERTMANAGER, "alerts": [{**alert, "startsAt": "2026-11-30T09:00:00Z"}]}
        )
        assert (fired.identity, ended.state) == (ended.identity, "resolved")
        assert ended.ended_ns is not None
        assert later.identity != fired.identity

    def test_go_s_zero_time_is_no_time(self):
        assert one("alertmanager", ALERTMANAGER).ended_ns is None

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'"x"', b"[[1]]", b"[" * 5000, b"\xff\xfe"])
    def test_what_is_no_object_is_refused_with_words(self, body):
        with pytest.raises(WireError):
            readers.read("generic", body)

    @given(
        source=st.sampled_from(list(readers.SOURCES)),
        document=st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=12),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            *(
                                "alerts",
                                "labels",
                                "annotations",
                                "status",
                                "startsAt",
                                "endsAt",
                                "fingerprint",
                            ),
                            *("key", "detector", "events", "states", "errorCode", "nodeName", "checkName"),
                            *("component", "health", "time", "title", "level", "instance", "severity"),
                        ]
                    ),
                    inner,
                    max_size=6,
                )
            ),
            max_leaves=16,
        ),
    )
    def test_no_body_of_any_shape_is_more_than_a_refusal(self, source, document):
        body = json.dumps(document).encode("utf-8", "surrogatepass")
        reports = []
        with contextlib.suppress(WireError):
            reports = readers.read(source, body)
        for report in reports:
            assert len(report.identity) == 64
            assert len(report.title) <= 200
            assert report.severity in {"info", "warn", "critical"}
            assert report.state in {"firing", "resolved"}
            assert "\0" not in report.title + report.text + report.node + report.run
            json.dumps(report.raw, allow_nan=False)


@pytest.fixture
def token(project):
    return hooks.create_token(project=project, source="alertmanager", name="prometheus")


def post(token, document=ALERTMANAGER, source="alertmanager", **headers):
    sent = {"authorization": f"Bearer {token}", **headers} if token else headers
    return Client().post(
        f"/api/v1/hooks/{source}", json.dumps(document), content_type="application/json", headers=sent
    )


@pytest.mark.django_db
class TestPosting:
    def test_bearer_basic_and_path_are_the_same_token(self, token):
        row, secret = token
        basic = base64.b64encode(f"andon:{secret}".encode()).decode()
        answers = [
            post(secret),
            post("", authorization=f"Basic {basic}"),
            Client().post(
                f"/api/v1/hooks/alertmanager/{secret}",
                json.dumps(ALERTMANAGER),
                content_type="application/json",
            ),
        ]
        assert [answer.status_code for answer in answers] == [202] * 3
        assert [answer.json() for answer in answers] == [
            {"accepted": 1, "new": 1},
            {"accepted": 1, "new": 0},
            {"accepted": 1, "new": 0},
        ]
        report = FleetReport.objects.get()
        assert (report.times, report.node, report.severity) == (3, "node-01", "critical")
        row.refresh_from_db()
        assert row.last_used_at is not None
        assert secret not in str(HookToken.objects.values())

    def test_the_wrong_the_revoked_the_expired_and_another_source_s_token_do_nothing(self, token, project):
        row, secret = token
        for wrong in ("", "nonsense", secret[:-1], secret + "x", "é" * 20):
            assert post(wrong).status_code == 401
        assert post("", authorization="Basic %%%").status_code == 401
        assert post("", source="no-such").status_code == 401
        assert post(secret, source="no-such").status_code == 404
        assert post(secret, source="gpud").status_code == 403
        _, past = hooks.create_token(project=project, source="alertmanager", name="old")
        HookToken.objects.filter(name="old").update(expires_at=timezone.now())
        assert post(past).status_code == 401
        assert hooks.revoke(row)
        assert post(secret).status_code == 401
        assert not FleetReport.objects.exists()

    def test_it_stands_on_the_open_incident_of_the_node_s_run_and_holds_nothing(self, token, world_):
        before = world_.directive(), world_.incident().state
        assert post(token[1]).status_code == 202
        entry = world_.incident().timeline.get(kind="fleet")
        assert entry.text == "Xid 79 on node-01, node-01"
        assert entry.occurred_at.isoformat() == "2026-11-30T03:12:07.412000+00:00"
        assert (world_.directive(), world_.incident().state) == before
        assert FleetReport.objects.get().run == world_.run
        post(token[1])
        assert world_.incident().timeline.filter(kind="fleet").count() == 1

    def test_the_on_call_page_shows_it_to_members_only(self, token, alice, charlie):
        post(token[1])
        for person, sees in ((alice, True), (charlie, False)):
            client = Client()
            client.force_login(person)
            assert ("Xid 79 on node-01" in client.get("/on-call").content.decode()) is sees
            assert ("1 token" in client.get("/system").content.decode().replace("\u00a0", " ")) is sees

    def test_a_critical_report_opens_no_incident_and_holds_no_run(self, token, project):
        from tests.incidents.world import World

        quiet = World(project, "quiet")
        assert post(token[1]).status_code == 202
        assert quiet.directive() == "continue"
        assert not quiet.run.incidents.exists()

    def test_a_token_reaches_only_runs_of_its_own_project(self, world_, project):
        other = Project.objects.create(slug="other", name="Other")
        _, foreign = hooks.create_token(project=other, source="trackio", name="other")
        assert post(foreign, TRACKIO, "trackio").status_code == 202
        assert FleetReport.objects.get().run is None
        assert not world_.incident().timeline.filter(kind="fleet").exists()

    def test_what_cannot_be_read_is_refused_with_its_field_and_counted(self, token):
        row, secret = token
        answer = Client().post(
            "/api/v1/hooks/alertmanager",
            b"{",
            content_type="application/json",
            headers={"authorization": f"Bearer {secret}"},
        )
        assert answer.status_code == 400
        assert answer.json()["field"] == "body"
        row.refresh_from_db()
        assert (row.refused, bool(row.refused_why)) == (1, True)

    def test_a_body_above_the_cap_is_413(self, token):
        big = {"alerts": [], "pad": "x" * hooks.CAP_BYTES}
        assert post(token[1], big).status_code == 413

    def test_a_flood_is_429_with_the_time_to_wait(self, token, settings, monkeypatch):
        monkeypatch.setattr(hooks, "BURST", 2)
        monkeypatch.setattr(hooks, "PER_S", 0.1)
        codes = [post(token[1]).status_code for _ in range(4)]
        assert codes[0] == 202
        assert codes[-1] == 429
        assert int(post(token[1])["Retry-After"]) > 0


@pytest.mark.django_db
def test_the_command_makes_lists_and_revokes(project, capsys):
    call_command("hook_token", "prometheus", source="alertmanager")
    secret = capsys.readouterr().out.strip()
    assert post(secret).status_code == 202
    row = HookToken.objects.get()
    call_command("hook_token", list=True)
    said = capsys.readouterr().out
    assert said.startswith(f"{row.pk} alertmanager prometheus: last used 2")
    assert secret not in said
    call_command("hook_token", revoke=row.pk)
    assert post(secret).status_code == 401
    with pytest.raises(CommandError, match="no live token"):
        call_command("hook_token", revoke=row.pk)


def test_a_token_in_an_address_is_in_no_log_line(caplog):
    record = logging.LogRecord(
        "django.request",
        logging.ERROR,
        __file__,
        1,
        "Internal Server Error: %s",
        ("/api/v1/hooks/gpud/andonhook_5f",),
        None,
    )
    assert MaskHookTokens().filter(record)
    assert record.getMessage() == "Internal Server Error: /api/v1/hooks/gpud/[masked]"
