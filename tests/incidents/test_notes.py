"""Notes: Markdown that can do nothing, kept under history, with images that are evidence."""

import re

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from evidence.custody import verify_custody
from evidence.gates import resume_gate
from evidence.models import Item, StoredObject
from incidents import actions, notes
from incidents.models import Note
from incidents.refused import Refused
from tests.andon.test_images import GIF, png

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _vault(settings, tmp_path):
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.DATA_DIR = tmp_path


def signed_in(person):
    client = Client()
    client.force_login(person)
    return client


def address(world, more=""):
    return f"/incidents/{world.incident().pk}{more}"


class TestMarkdown:
    def test_what_people_write(self):
        html = notes.render(
            "# Layer 6\n\n**one** sample, `step 7`\n- a\n- b\n\n|x|y|\n|-|-|\n|1|2|\n\n~~no~~"
        )
        for expected in (
            "<h4>Layer 6</h4>",
            "<strong>one</strong>",
            "<code>step 7</code>",
            "<li>a</li>",
            "<td>2</td>",
            "<s>no</s>",
        ):
            assert expected in html

    @pytest.mark.parametrize(
        "text",
        [
            "<script>alert(1)</script>",
            "<img src=x onerror=alert(1)>",
            "[x](javascript:alert(1))",
            "[x](JaVaScRiPt&colon;alert(1))",
            "[x](data:text/html;base64,PHNjcmlwdD4=)",
            "[x](//evil.example)",
            "![x](https://evil.example/pixel.png)",
            "![x](/incidents/1/approve)",
            "<a href='https://evil.example' onclick='alert(1)'>x</a>",
            "<style>*{display:none}</style><iframe src=//evil.example></iframe>",
            "`</code><script>alert(1)</script>`",
            "[x]: javascript:alert(1)\n[x]",
            "<javascript:alert(1)>",
            '[x](https://a.example" onmouseover="alert(1))',
        ],
    )
    def test_hostile_text_is_inert(self, text):
        html = notes.render(text)
        tags = re.findall(r"<[^>]*>", html)
        assert not any(
            re.search(r"script|\bon\w+=|style|iframe|javascript:|data:|evil", tag, re.I) for tag in tags
        ), tags

    def test_characters_that_hide_or_reorder_are_shown_as_such(self):
        assert notes.render("a\u202eb\u200bc\x1bd\te") == "<p>a\ufffdb\ufffdc\ufffdd\te</p>\n"

    def test_nothing_is_nested_deeper_than_a_reader_can_follow(self):
        assert notes.render(">" * 5000 + " x").count("<blockquote>") <= 20
        assert len(notes.render("[" * 5000)) < 20_000

    @given(st.text(max_size=200))
    def test_only_known_tags_and_addresses_come_out(self, text):
        for tag in re.findall(r"<(/?)([a-z0-9]+)([^>]*)>", notes.render(text)):
            assert tag[1] in notes._TAGS
            for name, value in re.findall(r'([a-z]+)="([^"]*)"', tag[2]):
                assert name in ("href", "src", "alt", "start", "rel")
                if name == "href":
                    assert re.match(r"https?://|/(?!/)|#", value)


class TestHistory:
    def test_a_change_keeps_the_text_before_it(self, world, team):
        client = signed_in(team.mira)
        client.post(address(world, "/notes"), {"text": "one **sample**"})
        first = Note.objects.get()
        client.post(address(world, "/notes"), {"text": "two samples", "replaces": first.pk})
        html = client.get(address(world)).content.decode()
        assert (
            html.index("two samples")
            < html.index("Earlier texts: 1")
            < html.index("one <strong>sample</strong>")
        )
        assert Note.objects.count() == 2

    def test_only_who_wrote_it_changes_it_and_not_an_old_text(self, world, team):
        first = actions.add_note(incident=world.incident(), person=team.mira, text="one")
        assert (
            signed_in(team.tomas)
            .post(address(world, "/notes"), {"text": "x", "replaces": first.pk})
            .status_code
            == 403
        )
        assert "Change note" not in signed_in(team.tomas).get(address(world)).content.decode()
        actions.add_note(incident=world.incident(), person=team.mira, text="two", replaces=first)
        with pytest.raises(Refused, match="You changed this note meanwhile"):
            actions.add_note(incident=world.incident(), person=team.mira, text="three", replaces=first)

    def test_its_text_as_typed_stands_only_in_the_form_of_who_wrote_it(self, world, team):
        note = actions.add_note(incident=world.incident(), person=team.mira, text="one \u202e <b>two</b>")
        form = address(world, f"/notes?change={note.pk}")
        assert "\u202e &lt;b&gt;two" in signed_in(team.mira).get(form).content.decode()
        assert "\u202e" not in signed_in(team.mira).get(address(world)).content.decode()
        assert signed_in(team.tomas).get(form).status_code == 404
        assert signed_in(team.mira).get(address(world, "/notes?change=x")).status_code == 404
        assert signed_in(team.mira).get(address(world, "/notes")).status_code == 405

    @pytest.mark.parametrize("number", ["x", "-1", "99999999", "9" * 30])
    def test_a_note_that_is_none_is_refused(self, world, team, number):
        answer = signed_in(team.mira).post(address(world, "/notes"), {"text": "x", "replaces": number})
        assert answer.status_code == 422
        assert not Note.objects.exists()

    def test_a_note_has_an_end(self, world, team):
        answer = signed_in(team.mira).post(address(world, "/notes"), {"text": "x" * (notes.MOST_CHARS + 1)})
        assert answer.status_code == 422

    def test_a_preview_is_rendered_and_kept_nowhere(self, world, team):
        answer = signed_in(team.mira).post(address(world, "/notes/preview"), {"text": "**x** <b>"})
        assert "<strong>x</strong> &lt;b&gt;" in answer.content.decode()
        assert not Note.objects.exists()
        assert (
            signed_in(team.charlie).post(address(world, "/notes/preview"), {"text": "x"}).status_code == 404
        )


class TestImages:
    def attach(self, client, world, body, name="a.png"):
        return client.post(address(world, "/images"), {"image": SimpleUploadedFile(name, body, "image/png")})

    def test_a_pasted_image_is_sealed_evidence_and_shown(self, world, team):
        client = signed_in(team.mira)
        markdown = self.attach(client, world, png(), "grad <norm>.png").json()["markdown"]
        assert re.fullmatch(r"!\[grad norm .png\]\(/incidents/\d+/images/[0-9a-f]{64}\)", markdown)
        dossier = world.incident().dossier
        item = Item.objects.get(kind="note_image")
        assert (item.state, item.required, item.lock) == ("sealed", False, "none")
        assert verify_custody(dossier) == []
        assert resume_gate(dossier).open
        client.post(address(world, "/notes"), {"text": markdown})
        source = re.search(
            r'<img src="([^"]+)" alt="grad norm .png">', client.get(address(world)).content.decode()
        )[1]
        shown = client.get(source)
        assert shown.content == png()
        assert shown["Content-Type"] == "image/png"
        assert "sandbox" in shown["Content-Security-Policy"]
        assert shown["X-Content-Type-Options"] == "nosniff"

    def test_a_chosen_file_goes_with_the_note(self, world, team):
        files = [SimpleUploadedFile("a.gif", GIF), SimpleUploadedFile("b.png", png(9, 9))]
        signed_in(team.mira).post(address(world, "/notes"), {"text": "look", "image": files})
        assert Note.objects.get().text.count("](/incidents/") == 2
        assert Item.objects.filter(kind="note_image").count() == 2

    def test_the_same_image_again_is_the_same_object(self, world, team):
        client = signed_in(team.mira)
        assert self.attach(client, world, png()).json() == self.attach(client, world, png()).json()
        assert StoredObject.objects.count() == 1

    @pytest.mark.parametrize("body", [b"<svg onload=alert(1)>", b"GIF89a", b"%PDF-1.7", b"MZ"])
    def test_what_is_no_image_is_refused_whatever_it_is_called(self, world, team, body):
        answer = self.attach(signed_in(team.mira), world, body)
        assert answer.status_code == 422
        assert answer.json()["says"].startswith("Not attached: the file")
        kept = signed_in(team.mira).post(
            address(world, "/notes"), {"text": "x", "image": SimpleUploadedFile("a.png", body)}
        )
        assert kept.status_code == 409
        assert not Item.objects.filter(kind="note_image").exists()
        assert not Note.objects.exists()

    def test_a_stranger_neither_attaches_nor_sees(self, world, team):
        self.attach(signed_in(team.mira), world, png())
        one = StoredObject.objects.get()
        stranger = signed_in(team.charlie)
        assert self.attach(stranger, world, png(4, 4)).status_code == 404
        assert stranger.get(address(world, f"/images/{one.sha256}")).status_code == 404
        assert signed_in(team.mira).get(address(world, "/images/" + "0" * 64)).status_code == 404
        assert signed_in(team.mira).get(address(world, "/images/../../x")).status_code == 404

    def test_bytes_that_changed_in_the_store_are_not_shown(self, world, team):
        client = signed_in(team.mira)
        self.attach(client, world, png())
        StoredObject.objects.update(sha256="1" * 64)
        assert client.get(address(world, "/images/" + "1" * 64)).status_code == 503

    def test_a_released_dossier_takes_nothing_more(self, world, team):
        dossier = world.incident().dossier
        dossier.released_at = dossier.opened_at
        dossier.save()
        assert "was released" in self.attach(signed_in(team.mira), world, png()).json()["says"]
