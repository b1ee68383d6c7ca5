"""The postmortem's pages: reading, editing, downloading, and who may."""

import json
import re

import pytest
from django.test import Client

from incidents.models import Incident, PostmortemEdit
from incidents.postmortem import build

pytestmark = pytest.mark.django_db(transaction=True)


def address(incident, more=""):
    return f"/incidents/{incident.id}/postmortem{more}"


def test_it_reads_from_the_head_to_the_rows_it_cites_and_every_form_is_a_file(as_bob, incident):
    html = as_bob.get(address(incident)).content.decode()
    assert "Draft, evidence" in html
    titles = re.findall(r"<h2>\d+\. ([^<]+)</h2>", html)
    assert titles == [
        "Summary", "Impact", "First failure", "Symptom and scope", "What changed", "Timeline", "Hypotheses",
        "Cause", "Recovery", "Regime changes", "What we learned", "Actions", "Evidence",
    ]  # fmt: skip
    assert "Rank 13 on node-01 was first: nonfinite at step 149, backward, layers.6.attn.qkv." in html
    assert html.count("<svg") >= 3
    assert "first bad: rank 13" in html
    cited = set(re.findall(r'<a href="#([A-Z]-\d+)">', html))
    assert cited == set(re.findall(r'class="cited" id="([A-Z]-\d+)"', html))
    # Under the page's policy nothing may be styled or run in place.
    assert " style=" not in html.split('<article class="pm">')[1].split("</article>")[0]
    # And every form of it is a file of its own.
    kinds = {"md": "text/markdown", "html": "text/html", "json": "application/json"}
    for form, kind in kinds.items():
        answer = as_bob.get(address(incident, f".{form}"))
        assert answer["Content-Type"].startswith(kind)
        assert answer["Content-Disposition"] == f'attachment; filename="postmortem-{incident.id}.{form}"'
        assert as_bob.get(address(incident, f".{form}")).content == answer.content
    told = json.loads(as_bob.get(address(incident, ".json")).content)
    assert told["digest"] == build.draft(incident.row).digest
    assert as_bob.get(address(incident, ".doc")).status_code == 404


def test_texts_and_actions_are_written_and_two_writers_are_told(as_bob, as_alice, incident):
    edit = address(incident, "/edit")
    assert "not written yet" in as_bob.get(edit).content.decode()
    done = as_bob.post(edit, {"part": "summary", "base": "", "text": "Rank 13 broke.\r\nWe skipped."})
    assert done["Location"] == f"{edit}#summary"
    late = as_alice.post(edit, {"part": "summary", "base": "", "text": "Mine <b>"})
    assert late.status_code == 409
    html = late.content.decode()
    assert "bob changed it" in html
    assert "Mine &lt;b&gt;" in html
    assert "We skipped." in html
    rows = {
        "what": ["check lengths", ""],
        "owner": ["bob", ""],
        "due": ["2026-12-24", ""],
        "ticket": ["", ""],
    }
    as_bob.post(edit, {"part": "actions", "base": "", **rows})
    wrong = as_bob.post(edit, {"part": "actions", "base": "", "what": ["x"], "due": ["soon"]})
    assert wrong.status_code == 422
    assert 'value="x"' in wrong.content.decode()
    page = as_bob.get(address(incident)).content.decode()
    assert "Rank 13 broke.<br>We skipped." in page
    assert "check lengths" in page
    assert PostmortemEdit.objects.count() == 2


def test_it_becomes_final_as_it_was_shown_and_is_opened_again_with_a_reason(as_bob, as_alice, incident):
    page = as_bob.get(address(incident)).content.decode()
    assert "not over" in page
    assert as_bob.post(address(incident, "/final"), {"digest": "x"}).status_code == 409
    Incident.objects.filter(pk=incident.id).update(state="resolved", resolved_at=incident.row.opened_at)
    as_bob.post(address(incident, "/edit"), {"part": "summary", "base": "", "text": "It broke."})
    as_bob.post(f"/incidents/{incident.id}/diagnosis/cause", {"certainty": "unknown", "why": "all was clean"})
    from evidence.actions import waive
    from evidence.models import Item

    bob = PostmortemEdit.objects.get().person
    for item in Item.objects.filter(dossier=incident.row.dossier, required=True, waived_at=None):
        if item.state not in {"sealed", "not_applicable"}:
            waive(item=item, person=bob, why="not posted")
    page = as_bob.get(address(incident)).content.decode()
    digest = re.search(r'name="digest" value="([0-9a-f]{64})"', page)[1]
    assert as_bob.post(address(incident, "/final"), {"digest": digest}).status_code == 302
    page = as_bob.get(address(incident)).content.decode()
    assert "Final, version 1" in page
    assert "Edit the texts" not in page
    refused = as_bob.post(address(incident, "/edit"), {"part": "summary", "base": "1", "text": "x"})
    assert refused.status_code == 409
    as_alice.post(address(incident, "/review"), {"digest": digest})
    assert "Reviewed by</dt><dd>alice" in as_bob.get(address(incident)).content.decode()
    assert as_bob.post(address(incident, "/reopen"), {"why": ""}).status_code == 409
    as_bob.post(address(incident, "/reopen"), {"why": "a probe came in"})
    assert "Draft, evidence" in as_bob.get(address(incident)).content.decode()


def test_a_viewer_reads_and_a_stranger_finds_nothing(as_charlie, incident, project):
    from runs.models import Role
    from tests.incidents.world import person

    client = Client()
    client.force_login(person(project, "vera", Role.VIEWER))
    page = client.get(address(incident)).content.decode()
    assert "writes its texts" in page
    assert "Make final" not in page
    said = {"part": "summary", "text": "x"}
    assert client.post(address(incident, "/edit"), said).status_code == 403
    for more in ("", "/edit", ".md", ".html", ".pdf", ".json"):
        assert as_charlie.get(address(incident, more)).status_code == 404
    for more in ("/final", "/reopen", "/review", "/edit"):
        assert as_charlie.post(address(incident, more), said).status_code == 404
