"""The postmortem of a real incident: every fact has its row, the same rows give the same bytes."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from django.test import Client
from django.utils import timezone

from andon.bag_trees import open_tree
from andon.bag_verify import verify
from andon.postmortem import document as form
from andon.postmortem import html, markdown
from evidence.proof.exporting import export_bag
from incidents import approval, board, diagnosing
from incidents.models import Incident, PostmortemEdit, PostmortemVersion
from incidents.postmortem import build, edits, goodput
from incidents.postmortem.facts import Facts
from incidents.postmortem.render import render
from incidents.refused import Refused
from runs.erasing import erase
from runs.models import Attempt, DirectiveAck, Event, Pending
from tests.incidents.world import World, seal

pytestmark = pytest.mark.django_db


def resumed(world, team):
    """The run goes on: mira asked, jonas approved, the permit was taken and the attempt launched."""
    incident = world.incident()
    DirectiveAck.objects.create(
        run=world.run, attempt=1, seq=2, state="held", step=1002, ranks=[0, 1, 2, 3],
        occurred_at=timezone.now(), received_at=timezone.now(),
    )  # fmt: skip
    digest = approval.subject(incident)[1]
    approval.request_resume(incident=incident, person=team.mira, digest=digest, note="skip it")
    approval.approve(incident=incident, person=team.jonas, digest=digest)
    approval.exchange(run=world.run, incident_id=incident.pk, attempt=2, webhook_id="take-1")
    world.launch(2, permit=str(world.permit().public_id))
    return world.incident()


def over(incident):
    """The watch window passed clean."""
    Incident.objects.filter(pk=incident.pk).update(state="resolved", resolved_at=timezone.now())
    incident.refresh_from_db()
    return incident


@pytest.fixture
def told(world, team):
    """A resumed incident with a cause and texts, as its people left it."""
    incident = over(resumed(world, team))
    carried = board.of(incident).row("data").carries[:1]
    said = {"certainty": "probable", "family": "data", "ids": carried, "why": "odd batch"}
    diagnosing.close_cause(incident=incident, person=team.tomas, **said)
    edits.write(
        incident=incident, person=team.tomas, part="summary", text="It spiked.\n\nWe skipped.", base=None
    )
    actions = [{"what": "filter by length", "owner": "tomas", "due": "2026-12-24", "ticket": "T-1"}]
    edits.list_actions(incident=incident, person=team.mira, rows=actions, base=None)
    seal(incident.dossier)
    # Curves are read from what a worker compacted, and from what waits for it: these events wait.
    waiting = Event.objects.filter(run_id=incident.run_id).order_by("pk")
    Pending.objects.bulk_create(
        Pending(run_id=one.run_id, what="event", ref=one.pk, received_at=one.received_at) for one in waiting
    )
    return incident


def items_of(document, key) -> Any:
    """Return what a section holds; each test knows of which kind that is."""
    return document.section(key).items


class TestFacts:
    def test_every_fact_cites_rows_and_every_cited_row_stands_in_the_appendix(self, told):
        document = build.draft(told)
        facts = [*document.head.rows]
        for section in document.sections:
            for item in section.items:
                facts += form.sentences(item)
        assert len(facts) > 40
        kept = {row.id: row for row in document.appendix}
        for fact in facts:
            assert fact.ids
            assert set(fact.ids) <= set(kept)
        assert {one for fact in facts for one in fact.ids} == set(kept)
        assert all(row.fields for row in kept.values())

    def test_a_sentence_without_an_id_cannot_be_made(self):
        with pytest.raises(ValueError, match="no id, no sentence"):
            form.Sentence("All is well.", ())
        with pytest.raises(ValueError, match="no id"):
            form.Row(("a", "b"), ("T",))

    def test_a_cited_row_that_is_missing_is_an_error_and_so_is_one_that_nobody_cites(self, told):
        document = build.draft(told)
        with pytest.raises(ValueError, match="not in the appendix: "):
            form.finished(msgspec.structs.replace(document, appendix=document.appendix[1:]))
        extra = (*document.appendix, form.Cited("F-999999", "x", ()))
        with pytest.raises(ValueError, match="not cited: F-999999"):
            form.finished(msgspec.structs.replace(document, appendix=extra))

    def test_it_says_what_broke_what_was_done_and_who_did_it(self, told, team):
        text = markdown.render(build.named(build.draft(told)))
        plain = text.replace("\\", "")
        finding = told.run.findings.get()
        told_at = "step 1,000, forward; the rank is not known."
        assert f"loss spike of loss at {told_at} [[F-{finding.pk}]](#f-{finding.pk})" in plain
        assert "Rollback: loader" in plain
        assert "mira asked at" in plain
        assert "jonas approved at" in plain
        assert re.search(r"Permit [0-9a-f-]{36} was issued", plain)
        assert "Cause probable: data, closed by tomas" in plain
        assert "results stay comparable" in plain
        assert "all ranks held" in plain
        assert "andon verify incident-" in plain
        assert "| filter by length | tomas | 2026-12-24 | T-1 |" in plain
        assert "> It spiked." in plain

    def test_impact_is_counted_from_the_ledger(self, told):
        rows = {row.cells[0]: row for row in items_of(build.draft(told), "impact")[0].rows}
        rollback = told.run.ledger.get(action="rollback")
        skip = told.run.ledger.get(action="skip")
        again = rows["GPU‑hours run again"]
        assert again.ids == (f"L-{rollback.seq}",)
        assert f"{rollback.steps_lost:,} steps" in again.cells[1]
        assert rows["Skipped"].cells[1] == f"{skip.samples_skipped:,} samples"
        # 1000 − 950 steps of 2 s on 4 GPUs: the checkpoint of step 950 was the last committed before it.
        assert rows["GPU‑hours lost before the failure"].cells[1].startswith("0.1")
        assert (
            "50 steps since the checkpoint of step 950" in rows["GPU‑hours lost before the failure"].cells[1]
        )

    def test_families_that_were_ruled_out_and_never_tried_are_both_said(self, told, team):
        diagnosing.start(incident=told, person=team.tomas, family="hardware", key="swap_node")
        diagnosing.record(incident=told, person=team.tomas, number=1, result="breaks")
        groups = {item.title: item for item in items_of(build.draft(told), "hypotheses")}
        hardware = [fact.text for fact in groups["Hardware"].facts]
        assert hardware[0].startswith("Ruled out")
        assert any("it breaks as before, on another node, recorded by" in text for text in hardware)
        assert "No probe of it was brought to a result." in [fact.text for fact in groups["Numerics"].facts]

    def test_an_incident_of_which_little_is_known_says_so(self, team, project):
        from incidents.actions import hold_by_hand

        bare = hold_by_hand(run=World(project, slug="bare").run, person=team.tomas, why="looks odd")
        document = build.draft(bare)
        text = markdown.render(document).replace("\\", "")
        assert "Nothing is known to be bad: a person held the run." in text
        assert "The cause is open" in text
        assert "The run has not been resumed yet." in text
        assert document.version.says.startswith("Draft, evidence 0 of ")
        viewer = Client()
        viewer.force_login(team.vera)
        pdf = viewer.get(f"/incidents/{bare.pk}/postmortem.pdf")
        assert (pdf.status_code, pdf["Content-Type"]) == (200, "application/pdf")
        assert pdf.content.startswith(b"%PDF-")


class TestSameBytes:
    @pytest.mark.parametrize("kind", ["md", "html", "json"])
    def test_the_same_rows_give_the_same_bytes_whenever_they_are_read(self, told, monkeypatch, kind):
        first = render(build.draft(told), kind)
        later = timezone.now() + timedelta(days=40)
        monkeypatch.setattr(timezone, "now", lambda: later)
        with timezone.override("Asia/Tokyo"):
            again = Incident.objects.select_related("run", "run__project", "dossier").get(pk=told.pk)
            assert render(build.draft(again), kind) == first

    def test_a_changed_row_changes_the_digest(self, told, team):
        before = build.draft(told).digest
        assert build.draft(told).digest == before
        base = edits.current(told)["summary"].pk
        edits.write(incident=told, person=team.tomas, part="summary", text="It spiked once.", base=base)
        assert build.draft(told).digest != before

    def test_it_stands_still_while_the_run_goes_on(self, world, told):
        before = build.draft(told).digest
        world.checkpoint(960, attempt=2, state="committed")
        world.steps(951, 970, attempt=2)
        assert build.draft(told).digest == before

    def test_json_is_read_back_as_it_was(self, told):
        document = build.draft(told)
        assert form.decode(form.encode(document)) == document

    def test_html_is_one_file_that_loads_nothing(self, told):
        text = html.render(build.named(build.draft(told)))
        assert "<script" not in text
        assert not re.findall(r"""(?:src|href)=["'](?!#)""", text)
        assert not re.findall(r"url\(|@import", text)
        assert text.count("<svg") >= 2
        ids = set(re.findall(r'class="cited" id="([A-Z]-\d+)"', text))
        assert set(re.findall(r'href="#([A-Z]-\d+)"', text)) == ids


class TestEdits:
    def test_of_two_who_write_at_once_the_second_is_told(self, world, team):
        incident = world.incident()
        first = edits.write(incident=incident, person=team.tomas, part="impact", text="a", base=None)
        with pytest.raises(Refused, match="tomas changed it") as refused:
            edits.write(incident=incident, person=team.mira, part="impact", text="b", base=None)
        assert refused.value.code == "changed-since"
        edits.write(incident=incident, person=team.mira, part="impact", text="a and b", base=first.pk)
        assert [edit.text for edit in edits.history(incident)] == ["a and b", "a"]

    def test_only_members_with_a_part_write(self, world, team):
        for person in (team.vera, team.charlie):
            with pytest.raises(Refused, match="Only a responder"):
                edits.write(incident=world.incident(), person=person, part="summary", text="x", base=None)
        with pytest.raises(Refused, match="no part"):
            edits.write(incident=world.incident(), person=team.tomas, part="head", text="x", base=None)

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ({"owner": "mira"}, "what is to be done"),
            ({"what": "x", "due": "soon"}, "due must be a date"),
            ({"what": "x" * 501}, "longer than 500"),
        ],
    )
    def test_an_action_says_what_and_when(self, world, team, row, says):
        with pytest.raises(Refused, match=says):
            edits.list_actions(incident=world.incident(), person=team.tomas, rows=[row], base=None)

    def test_final_freezes_and_a_reason_opens_it_again(self, told, team):
        document = build.draft(told)
        said = {"incident": told, "person": team.tomas, "document": document}
        with pytest.raises(Refused, match="cannot be final yet: the cause"):
            edits.finalise(**said, digest=document.digest, lacks=["the cause is open"])
        with pytest.raises(Refused, match="changed since"):
            edits.finalise(**said, digest="0" * 64, lacks=[])
        assert build.lacks(told) == []
        edits.finalise(**said, digest=document.digest, lacks=build.lacks(told))
        diagnosing.take(incident=told, person=team.tomas, family="data")  # the rows go on
        frozen = build.of(told)
        assert (frozen.version.status, frozen.version.number) == ("final", 1)
        assert frozen.digest == document.digest == form.finished(frozen).digest
        with pytest.raises(Refused, match="Version 1 is final"):
            edits.write(incident=told, person=team.tomas, part="summary", text="x", base=None)
        with pytest.raises(Refused, match="You wrote in it"):
            edits.review(incident=told, person=team.tomas, digest=document.digest)
        edits.review(incident=told, person=team.jonas, digest=document.digest)
        assert build.named(build.of(told)).version.reviewers == ("jonas",)
        edits.reopen(incident=told, person=team.tomas, why="a probe came in")
        assert build.of(told).version.status == "draft"
        assert [row.document is None for row in PostmortemVersion.objects.order_by("number")] == [False, True]

    def test_a_draft_says_what_it_lacks(self, world, team):
        lacks = " ".join(build.lacks(world.incident()))
        assert "not over" in lacks
        assert "summary" in lacks
        assert "cause is open" in lacks


class TestNames:
    def test_a_bag_holds_it_without_names_and_a_download_shows_those_there_still_are(
        self, told, team, tmp_path
    ):
        export_bag(told.dossier, tmp_path / "bag")
        assert verify(open_tree(tmp_path / "bag"), None).problems == []
        folder = tmp_path / "bag" / "data" / "postmortem"
        assert sorted(path.name for path in folder.iterdir()) == [
            "postmortem.html", "postmortem.json", "postmortem.md",
        ]  # fmt: skip
        for path in folder.iterdir():
            text = path.read_text()
            assert "jonas" not in text, path.name
            assert str(team.jonas.opaque_id)[:8] in text
        assert json.loads((folder / "postmortem.json").read_text())["schema"] == "andon.postmortem/1"
        shown = markdown.render(build.named(build.draft(told)))
        assert "jonas" in shown
        erase(team.jonas)
        assert "jonas" not in markdown.render(build.named(build.draft(told)))

    def test_what_a_trainer_wrote_is_shown_as_text(self, world, told, team):
        hostile = "<script>alert(1)</script> | **x** \u202e`rm`\n# head"
        joined = {"incident": str(told.pk), "needs_incident": False, "send": False}
        world.finding("grad_norm_spike", step=1001, detail=hostile, **joined)
        edits.write(
            incident=told, person=team.tomas, part="learned", text="<img src=x>\n# no head", base=None
        )
        document = build.named(build.draft(told))
        text = html.render(document)
        assert "<script>" not in text
        assert "<img" not in text
        shown = markdown.render(document)
        assert "\u202e" not in shown
        assert "<script>" not in re.sub(r"\\<", "", shown)
        assert not re.search(r"^# (?!Loss)", shown, re.M)

    def test_history_can_only_be_added_to(self, told):
        with pytest.raises(Exception, match="append-only"):
            PostmortemEdit.objects.update(text="x")


class TestGoodput:
    def test_it_is_what_was_kept_of_what_was_allocated_until_the_incident_was_over(self, project):
        world = World(project, slug="weekly")
        world.spike(at=100, since=98)
        incident = world.incident()
        assert goodput.of_week(Facts(incident)) == ("not known yet: the incident is not over", [])
        # A Wednesday: 100 steps of 60 s each in 7,200 s on 4 GPUs, of which the last 20 were thrown away.
        began = datetime(2026, 3, 4, 12, tzinfo=UTC)
        for step in range(1, 101):
            at = began + timedelta(seconds=60 * step)
            told = {"type": "step", "step": step, "data": {"step_time_s": 60.0}, "occurred_at": at}
            of = {"run_id": world.run.pk, "attempt": 1, "webhook_id": f"goodput-{step}"}
            Event.objects.create(received_at=timezone.now(), **told, **of)
        Attempt.objects.filter(run=world.run).update(launched_at=began, exited_at=None, first_step=1)
        Incident.objects.filter(pk=incident.pk).update(
            state="resolved", opened_at=began, resolved_at=began + timedelta(hours=2)
        )
        incident.refresh_from_db()
        said, launches = goodput.of_week(Facts(incident))
        assert said.startswith("83")  # 6,000 of 7,200 s
        assert "6.7 of 8.0" in said
        assert [one.number for one in launches] == [1]
        world.launch(2)
        Attempt.objects.filter(run=world.run, number=2).update(
            launched_at=began + timedelta(hours=2, seconds=-1), began_from={"step": 80}
        )
        assert goodput.of_week(Facts(incident))[0].startswith("66")  # 4,800 of 7,200 s
        # What happens after it was over is not counted.
        Incident.objects.filter(pk=incident.pk).update(resolved_at=began + timedelta(hours=1))
        incident.refresh_from_db()
        assert "4.0 of 4.0" in goodput.of_week(Facts(incident))[0]
