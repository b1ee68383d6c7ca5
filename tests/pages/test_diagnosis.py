"""The diagnosis board as people see and press it."""

import re

import pytest
from django.test import Client

from incidents.models import BoardChange, Probe

pytestmark = pytest.mark.django_db(transaction=True)


def board(client, incident):
    return client.get(f"/incidents/{incident.id}/parts/board").content.decode()


def press(client, incident, what, **form):
    return client.post(f"/incidents/{incident.id}/diagnosis/{what}", form)


def rows(html):
    body = html.split("<tbody>")[1].split("</tbody>")[0]
    return [re.sub(r"<[^>]+>", " ", row) for row in body.split("<tr>")[1:]]


class TestBoard:
    def test_it_names_every_family_with_the_row_each_line_came_from(self, as_bob, incident):
        html = board(as_bob, incident)
        shown = rows(html)
        assert [row.split()[0] for row in shown] == [
            "Data", "Numerics", "Optimizer", "Distributed", "Communication", "Hardware", "Code/config",
        ]  # fmt: skip
        assert "leading" in shown[0]
        assert "unlikely" in shown[4]
        assert "before any exchange with other ranks" in shown[4]
        finding = incident.run.findings.filter(kind="nonfinite").order_by("step", "id").first()
        assert f">F-{finding.pk}</a>" in html
        assert "ruled out" not in html.split("<tbody>")[1]

    def test_a_probe_is_started_recorded_and_rules_out(self, as_bob, incident):
        answer = press(as_bob, incident, "start", family="hardware", probe="swap_node")
        assert answer["Location"] == f"/incidents/{incident.id}#diagnosis"
        html = board(as_bob, incident)
        assert "Only the node differs." in html
        assert "export_bag" in html
        # Whoever wants another is asked to stop this one.
        assert "Stop H-1 and start this" in html
        refused = press(as_bob, incident, "start", family="data", probe="other_batch")
        assert refused.status_code == 409
        assert "is running" in refused.content.decode()
        press(as_bob, incident, "result", number="1", result="breaks", note="on node-01")
        hardware = rows(board(as_bob, incident))[5]
        assert "ruled out" in hardware
        assert "it breaks as before, on another node" in hardware

    def test_the_cause_is_closed_from_its_familys_row_or_as_unknown(self, as_bob, incident):
        html = board(as_bob, incident)
        carried = re.search(r'name="ids" value="(F-\d+)"', html)[1]
        press(as_bob, incident, "cause", family="data", certainty="probable", ids=carried, why="odd sample")
        assert "Cause probable: data." in board(as_bob, incident)
        press(as_bob, incident, "cause", certainty="unknown", why="replays were clean")
        html = board(as_bob, incident)
        assert "Cause unknown." in html
        assert "History: 2" in html.replace("\u00a0", " ")

    def test_a_viewer_sees_who_may_and_no_button(self, incident, project):
        from runs.models import Role
        from tests.incidents.world import person

        vera = person(project, "vera", Role.VIEWER)
        client = Client()
        client.force_login(vera)
        html = board(client, incident)
        assert "<button" not in html
        assert "works this board" in html
        assert press(client, incident, "take", family="data").status_code == 403

    def test_nonsense_is_refused_in_words_and_to_strangers_nothing_is_there(
        self, as_bob, as_charlie, incident
    ):
        nonsense = {
            "take": {"family": "<script>"},
            "release": {"family": "cause unknown"},
            "start": {"family": "data", "probe": "rm -rf"},
            "stop": {"number": "9" * 40},
            "result": {"number": "-1", "result": "breaks"},
            "cause": {"certainty": "certain", "why": "x"},
        }
        for what, form in nonsense.items():
            answer = press(as_bob, incident, what, **form)
            assert answer.status_code in {404, 409, 422}, what
            assert 'role="alert"' in answer.content.decode()
            assert "“<script>" not in answer.content.decode()
            assert press(as_charlie, incident, what, family="data").status_code == 404
        assert not BoardChange.objects.exists()

    def test_names_from_outside_are_inert_and_what_did_not_change_answers_304(self, as_bob, bob, incident):
        press(as_bob, incident, "start", family="data", probe="own", name="<b>x</b>\u202e", condition="<i>")
        assert Probe.objects.get().owner == bob
        html = board(as_bob, incident)
        assert "<b>x</b>" not in html
        assert "\u202e" not in html
        first = as_bob.get(f"/incidents/{incident.id}/parts/board")
        again = as_bob.get(f"/incidents/{incident.id}/parts/board", headers={"If-None-Match": first["ETag"]})
        assert again.status_code == 304
