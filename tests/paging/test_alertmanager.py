"""Debian's real Alertmanager, both ways: our pages are alerts there, its alerts are reports here."""

import json
import urllib.request
from datetime import UTC, datetime

import pytest
from django.utils import timezone

from incidents.models import Incident
from incidents.paging import asking
from incidents.paging.models import Delivery
from runs import hooks, work
from runs.models import FleetReport, Work
from tests.conftest import needs
from tests.incidents.world import held
from tests.paging.receivers import alertmanager, alerts, until


@pytest.fixture
def both(project, live_server, tmp_path, settings):
    """A run held by an incident, an Alertmanager that posts to this server, and a file that names it."""
    needs("prometheus-alertmanager")
    world = held(project)
    _, token = hooks.create_token(project=project, source="alertmanager", name="alertmanager")
    hook = f"{live_server.url}/api/v1/hooks/alertmanager"
    with alertmanager(tmp_path, hook, token) as url:
        file = tmp_path / "paging.toml"
        file.write_text(
            'steps = [{after_min = 0, channels = ["am"]}]\n'
            f'[channels.am]\nkind = "alertmanager"\naddress = "{url}"\n'
        )
        settings.PAGING_FILE = str(file)
        yield world, url


def tell(url, labels, **fields):
    body = json.dumps([{"labels": labels, **fields}]).encode()
    request = urllib.request.Request(
        f"{url}/api/v2/alerts", body, {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.status == 200


@pytest.mark.django_db(transaction=True)
def test_pages_out_and_alerts_in(both):
    world, url = both
    incident = world.incident()
    work.run_due()
    (alert,) = alerts(url)
    assert alert["labels"] == {
        "alertname": "AndonIncident",
        "severity": "critical",
        "service": "andon",
        "page": f"incident-{incident.pk}",
        "group": f"incident-{incident.pk}",
        "run": "pt-13b-web3",
        "project": "default",
        "incident": str(incident.pk),
    }
    assert alert["annotations"]["summary"] == "pt-13b-web3: Loss spike that did not recover"
    # Told again while it fires, by the same row: still one alert.
    assert Work.objects.filter(kind="incidents.deliver", state="due").update(not_before=timezone.now()) == 1
    work.run_due()
    assert [one["fingerprint"] for one in alerts(url)] == [alert["fingerprint"]]

    labels = {"alertname": "GpuFellOff", "severity": "critical", "node": "node-01"}
    tell(url, labels, annotations={"summary": "Xid 79 on node-01"})
    report = until("the alert arrives", FleetReport.objects.first)
    assert (report.title, report.run, report.state) == ("Xid 79 on node-01", world.run, "firing")
    until("it stands on the timeline", lambda: incident.timeline.filter(kind="fleet").exists())
    tell(url, labels, endsAt=datetime.now(UTC).isoformat())
    until("its end arrives", lambda: FleetReport.objects.filter(state="resolved").exists())

    Incident.objects.filter(pk=incident.pk).update(state="resolved", resolved_at=timezone.now())
    asking.ask(incident.pk)
    work.run_due()
    until("our alert is over", lambda: alerts(url) == [])
    assert Delivery.objects.count() == 1
    # What Alertmanager told us of our own page is no report of a fleet.
    assert FleetReport.objects.count() == 1
