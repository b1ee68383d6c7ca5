"""Every page says the words a person needs, to those who may read them, and to nobody else."""

import re

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from incidents.models import Incident
from runs import overview
from runs.actions import create_run
from runs.models import RunProgress, UnreadBody
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)

MOST_STATEMENTS = 84  # of the whole incident page, frame included


class TestSignIn:
    def test_a_visitor_is_sent_to_sign_in_and_then_where_the_link_pointed(self, alice):
        client = Client()
        first = client.get("/incidents?state=open")
        assert first.status_code == 302
        assert first["Location"] == "/sign-in?next=/incidents%3Fstate%3Dopen"
        done = client.post(
            "/sign-in", {"username": "alice", "password": "alice-password", "next": "/incidents?state=open"}
        )
        assert done["Location"] == "/incidents?state=open"

    @pytest.mark.parametrize(
        "target", ["https://evil.example/", "//evil.example", "javascript:alert(1)", "\\\\evil"]
    )
    def test_next_never_leaves_this_server(self, alice, target):
        done = Client().post("/sign-in", {"username": "alice", "password": "alice-password", "next": target})
        assert done["Location"] == "/runs"

    @pytest.mark.parametrize("pair", [("alice", "wrong"), ("nobody", "alice-password"), ("", "")])
    def test_every_wrong_pair_gets_the_same_sentence(self, alice, pair):
        answer = Client().post("/sign-in", {"username": pair[0], "password": pair[1]})
        assert answer.status_code == 400
        assert "That name and password do not fit." in text_of(answer)

    def test_guessing_is_slowed_and_says_for_how_long(self, alice):
        client = Client()
        for _ in range(5):
            client.post("/sign-in", {"username": "Alice", "password": "wrong"})
        answer = client.post("/sign-in", {"username": "alice", "password": "alice-password"})
        assert answer.status_code == 429
        assert 0 < int(answer["Retry-After"]) <= 60
        assert f"Try again in {answer['Retry-After']} s" in text_of(answer)
        assert "_auth_user_id" not in client.session

    def test_signing_out_needs_a_post(self, as_alice):
        assert as_alice.get("/sign-out").status_code == 405
        as_alice.post("/sign-out")
        assert as_alice.get("/runs").status_code == 302


class TestRuns:
    def test_an_empty_server_says_how_to_begin(self, as_alice):
        words = text_of(as_alice.get("/runs"))
        assert "No runs yet" in words
        assert "create_run" in words
        assert "whsec_" in words

    def test_the_root_leads_to_the_runs(self, as_alice):
        assert as_alice.get("/")["Location"] == "/runs"

    def test_a_held_run_stands_first_with_its_incident(self, as_bob, incident):
        create_run(name="a-first-by-name")
        words = text_of(as_bob.get("/runs"))
        assert words.index("gpt-16") < words.index("a-first-by-name")
        assert "held" in words
        assert "no steps received" in words
        assert f"{incident.id} open" in words
        assert "NaN" in words

    def test_it_says_who_waits_for_a_person_and_what_today_cost(self, as_bob, incident):
        words = text_of(as_bob.get("/runs"))
        assert "0, was 72.8 k" in words  # 65,536 tokens in 0.9 s, and held since
        assert re.search(r"\d % ", words.split("gpt-16")[-1])
        assert "Open incident 1" in words
        assert "gpt-16" in text_of(as_bob.get("/runs?state=open+incident"))
        incident.row.state = "watching"
        incident.row.save(update_fields=["state"])
        assert "Open incident 0" in text_of(as_bob.get("/runs?state=watching"))
        assert "gpt-16" in text_of(as_bob.get("/runs?state=watching"))

    def test_a_run_that_goes_on_with_an_open_incident_stands_right_after_those_that_are_held(self):
        at = timezone.now()
        runs = [("running", ""), ("no progress", ""), ("running", "open incident"), ("held", "open incident")]
        made = [
            overview.Standing(number, f"run-{number}", state, at, at, open_one)
            for number, (state, open_one) in enumerate(runs)
        ]
        assert [one.pk for one in sorted(made, key=lambda one: one.urgency)] == [3, 2, 1, 0]

    def test_the_filter_and_the_search_narrow_the_list(self, as_bob, incident):
        create_run(name="quiet")
        assert "quiet" not in text_of(as_bob.get("/runs?state=held"))
        assert "gpt-16" in text_of(as_bob.get("/runs?q=GPT"))
        assert "No run fits this filter" in text_of(as_bob.get("/runs?q=nothing"))

    def test_a_run_says_what_it_has_been_doing(self, as_bob, incident):
        words = text_of(as_bob.get("/runs/gpt-16"))
        for expected in (
            "Held",
            "world size 16",
            f"step {incident.step + 1}",
            "◆ verified",
            "nonfinite act",
            "None found",
        ):
            assert expected in re.sub(r"\s+", " ", words), expected

    def test_bodies_that_could_not_be_read_are_shown_with_the_error_the_sender_got(self, as_bob, incident):
        UnreadBody.objects.create(
            run=incident.run,
            webhook_id="wh-9",
            received_at=incident.row.opened_at,
            status=422,
            problem={"detail": "step must be 0 to 2^63−1", "field": "step"},
            body=b"x",
            bytes_total=1,
        )
        words = text_of(as_bob.get("/runs/gpt-16"))
        assert "step must be 0 to 2^63−1" in words
        assert "422" in words

    def test_a_run_that_nobody_watches_says_so(self, as_bob, incident):
        RunProgress.objects.filter(run=incident.run).update(
            not_watched_since=incident.row.opened_at, not_watched_why="detector raised KeyError"
        )
        assert "detector raised KeyError" in text_of(as_bob.get("/runs/gpt-16"))
        assert "gpt-16 since" in text_of(as_bob.get("/system"))

    def test_the_figure_of_a_run_ends_its_line_before_a_nan_and_marks_it(self, as_bob, incident):
        figure = as_bob.get("/runs/gpt-16/figure.json?range=attempt").json()
        marks = [trace for trace in figure["data"] if "nonfinite" in trace.get("name", "")]
        assert any("NaN" in text for trace in marks for text in trace["text"])
        loss = next(trace for trace in figure["data"] if trace.get("name") == "Loss")
        assert loss["connectgaps"] is False
        assert "Loss scale" in figure["layout"]["meta"]["absent"]


class TestIncident:
    def test_the_first_screen_answers_the_four_questions(self, as_bob, incident):
        words = text_of(as_bob.get(f"/incidents/{incident.id}"))
        assert f"rank 13 on node-01, step {incident.step}, backward" in words
        assert re.search(r"\d of \d held, \d sealed", words)
        assert f"Held after step {incident.step + 1}" in words
        assert "16 of 16 ranks obey" in words
        assert "Acknowledge" in words
        assert "16 GPUs idle" in words

    def test_the_bad_cells_stand_as_text(self, as_bob, incident):
        words = text_of(as_bob.get(f"/incidents/{incident.id}"))
        assert "Bad cells as text" in words
        assert re.search(rf"{incident.step} backward 13 node-01, GPU 5 nonfinite, local", words)

    def test_the_page_has_the_plan_the_gate_and_what_is_signed(self, as_bob, incident):
        words = text_of(as_bob.get(f"/incidents/{incident.id}"))
        for expected in (
            "What an approver signs",
            "step 120, verified",
            "Contained",
            "alice may approve",
            "Digest",
        ):
            assert expected in words, expected

    def test_the_evidence_list_names_states_and_checks_the_chain(self, as_bob, incident):
        page = as_bob.get(f"/incidents/{incident.id}")
        assert "last good checkpoint, step 120" in text_of(page)
        assert "chain verified" in text_of(page)
        assert 'aria-label="sealed"' in page.content.decode()
        assert "custody row" in text_of(page)

    def test_a_broken_chain_says_do_not_export(self, as_bob, incident):
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE evidence_custodyrow DISABLE TRIGGER append_only")
            cursor.execute("UPDATE evidence_custodyrow SET who = 'mallory' WHERE seq = 1")
            cursor.execute("ALTER TABLE evidence_custodyrow ENABLE TRIGGER append_only")
        from evidence.pages import listing

        listing._checked.cache_clear()
        assert "Chain broken, do not export" in text_of(as_bob.get(f"/incidents/{incident.id}"))

    def test_the_list_shows_it_and_filters_by_state(self, as_bob, incident):
        words = text_of(as_bob.get("/incidents"))
        assert "gpt-16" in words
        assert "unacknowledged" in words
        assert "No incident fits" in text_of(as_bob.get("/incidents?state=resolved"))

    def test_every_other_page_carries_the_alarm_line_and_its_own_does_not(self, as_bob, incident):
        assert "gpt-16 held" in text_of(as_bob.get("/vault"))
        assert 'class="alarm' not in as_bob.get(f"/incidents/{incident.id}").content.decode()

    def test_the_page_reads_little(self, as_bob, incident):
        """Each statement is a wait: what several parts need is read once (`runs.reading`)."""
        as_bob.get(f"/incidents/{incident.id}")
        with CaptureQueriesContext(connection) as asked:
            as_bob.get(f"/incidents/{incident.id}")
        assert len(asked) <= MOST_STATEMENTS

    def test_the_figure_rings_the_first_bad_cell_at_its_place(self, as_bob, incident):
        figure = as_bob.get(f"/incidents/{incident.id}/figure.json").json()
        rings = [
            shape
            for shape in figure["layout"]["shapes"]
            if shape["type"] == "circle" and shape["yref"] == "y2"
        ]
        assert {(ring["xanchor"], ring["yanchor"]) for ring in rings} == {(incident.step, 13)}
        image = next(trace for trace in figure["data"] if trace["type"] == "image")
        left = image["x0"] - image["dx"] / 2
        assert left == figure["layout"]["xaxis"]["range"][0]
        assert any("first bad: rank 13" in note["text"] for note in figure["layout"]["annotations"])

    def test_a_zoomed_figure_keeps_the_ring_and_a_far_one_does_not_pretend(self, as_bob, incident):
        near = as_bob.get(
            f"/incidents/{incident.id}/figure.json?steps={incident.step}-{incident.step}&ranks=13-13"
        )
        assert [s for s in near.json()["layout"]["shapes"] if s["type"] == "circle"]
        far = as_bob.get(f"/incidents/{incident.id}/figure.json?steps=1-20")
        assert not [s for s in far.json()["layout"]["shapes"] if s["type"] == "circle"]

    def test_exact_cells_name_the_bad_one_and_what_followed(self, as_bob, incident):
        cells = as_bob.get(f"/incidents/{incident.id}/cells.json").json()
        assert [incident.step, incident.step, 13, 13, 9] in cells["runs"]
        assert cells["counts"]["nonfinite"] == 1
        assert cells["counts"]["spread"] >= 15
        assert cells["counts"]["held"] > 0
        assert cells["nodes"][1][0] == "node-01"

    def test_one_cell_gives_its_values(self, as_bob, incident):
        says = as_bob.get(f"/incidents/{incident.id}/cell.json?step={incident.step}&rank=13").json()["says"]
        assert "loss 2.113" in says
        assert "received" in says
        assert as_bob.get(f"/incidents/{incident.id}/cell.json?step=x&rank=1").status_code == 400

    def test_a_tile_shows_the_bad_cell_in_any_window(self, as_bob, incident):
        from tests.pages.test_grid_png import decode

        for query in ("", f"?steps=0-{incident.step + 40}&w=60&h=8", "?steps=0-100000&w=100&h=4"):
            plane, _ = decode(as_bob.get(f"/incidents/{incident.id}/grid.png{query}").content)
            assert 9 in plane, query

    def test_a_tile_asked_for_by_its_version_is_kept_for_ever(self, as_bob, incident):
        meta = as_bob.get(f"/incidents/{incident.id}/figure.json").json()["layout"]["meta"]
        assert "immutable" in as_bob.get(meta["overview"])["Cache-Control"]
        assert "no-cache" in as_bob.get(f"/incidents/{incident.id}/grid.png")["Cache-Control"]


class TestLive:
    @pytest.mark.parametrize(
        "part", ["answers", "evidence", "plan", "timeline", "ledger", "changed", "first_hour", "notes"]
    )
    def test_a_part_that_did_not_change_answers_304(self, as_bob, incident, part):
        address = f"/incidents/{incident.id}/parts/{part}"
        tag = as_bob.get(address)["ETag"]
        for _ in range(5):  # "held 4 s" may become "held 5 s" between two answers, which is a change
            again = as_bob.get(address, headers={"if-none-match": tag})
            if again.status_code == 304:
                break
            tag = again["ETag"]
        assert again.status_code == 304
        assert not again.content

    def test_the_page_holds_the_tag_from_the_start(self, as_bob, incident):
        page = as_bob.get(f"/incidents/{incident.id}").content.decode()
        assert as_bob.get(f"/incidents/{incident.id}/parts/timeline")["ETag"].replace('"', "&quot;") in page

    def test_a_change_changes_the_tag(self, as_bob, incident):
        address = f"/incidents/{incident.id}/parts/answers"
        before = as_bob.get(address)["ETag"]
        as_bob.post(f"/incidents/{incident.id}/acknowledge")
        assert as_bob.get(address, headers={"if-none-match": before}).status_code == 200

    @pytest.mark.parametrize(
        ("part", "most"),
        [
            *(("answers", 44), ("evidence", 16), ("plan", 48), ("timeline", 8), ("ledger", 8)),
            *(("changed", 26), ("neighbours", 12), ("first_hour", 60), ("similar", 12), ("notes", 12)),
        ],
    )
    def test_a_part_reads_only_what_it_shows(
        self, as_bob, incident, part, most, django_assert_max_num_queries
    ):
        as_bob.get(f"/incidents/{incident.id}/parts/{part}")
        with django_assert_max_num_queries(most):
            as_bob.get(f"/incidents/{incident.id}/parts/{part}")

    def test_an_unknown_part_is_404(self, as_bob, incident):
        assert as_bob.get(f"/incidents/{incident.id}/parts/secrets").status_code == 404


class TestOtherPages:
    def test_the_dossier_shows_items_objects_holds_custody_and_how_to_check(self, as_bob, incident):
        dossier = incident.row.dossier_id
        words = text_of(as_bob.get(f"/vault/{dossier}"))
        for expected in (
            "last good checkpoint, step 120",
            "model.bin",
            "file://",
            "opened",
            f"export_bag --dossier {dossier}",
            "andon verify andon-gpt-16-dossier-",
        ):
            assert expected in words, expected
        assert f"incident {incident.id}" in text_of(as_bob.get("/vault"))

    def test_an_empty_vault_says_so(self, as_bob):
        assert "Nothing is held" in text_of(as_bob.get("/vault"))

    def test_the_ledger_shows_the_hold_with_its_positions_and_checks_the_chain(self, as_bob, incident):
        words = text_of(as_bob.get("/runs/gpt-16/ledger"))
        assert "hold" in words
        assert "0–15" in words
        assert "chain verified" in words
        assert "hold" in text_of(as_bob.get("/ledger"))

    def test_the_system_page_names_every_part(self, as_bob):
        words = text_of(as_bob.get("/system"))
        for part in (
            "Web",
            "PostgreSQL",
            "Broker",
            "Worker",
            "Queue",
            "Clocks",
            "Detection",
            "Grid and curves",
            "Runs not watched",
            "Vault",
            "Bodies that could not be read",
        ):
            assert part in words

    def test_a_part_that_does_not_answer_is_not_called_ok(self, as_bob, settings, tmp_path):
        (tmp_path / "file").write_text("not a directory")
        settings.VAULT_URL = f"file://{tmp_path}/file/vault"
        assert re.search(r"Vault does not answer", text_of(as_bob.get("/system")))

    def test_search_jumps_to_an_exact_id_and_lists_the_rest(self, as_bob, incident):
        assert as_bob.get("/search?q=gpt-16")["Location"] == "/runs/gpt-16"
        assert as_bob.get(f"/search?q={incident.id}")["Location"] == f"/incidents/{incident.id}"
        assert "gpt-16" in text_of(as_bob.get("/search?q=gpt"))
        assert "Nothing found" in text_of(as_bob.get("/search?q=zzz"))

    def test_the_theme_is_the_persons_choice(self, as_bob):
        as_bob.post("/theme", {"theme": "dark", "next": "/runs"})
        assert 'data-theme="dark"' in as_bob.get("/runs").content.decode()


class TestFrame:
    def test_a_404_keeps_the_frame_and_offers_the_search(self, as_bob):
        answer = as_bob.get("/runs/no-such-run")
        assert answer.status_code == 404
        assert 'value="no-such-run"' in answer.content.decode()
        assert "Sign out" in text_of(answer)

    def test_a_500_gives_a_reference_inside_the_frame(self, as_bob, incident, monkeypatch):
        as_bob.raise_request_exception = False
        # A broken row, not a mock: a first-bad document that is no document.
        Incident.objects.filter(pk=incident.id).update(first_bad="broken")
        answer = as_bob.get(f"/incidents/{incident.id}")
        assert answer.status_code == 500
        assert re.search(r"reference [0-9a-f]{12}", text_of(answer))

    def test_pages_forbid_scripts_that_are_not_ours(self, as_bob):
        policy = as_bob.get("/runs")["Content-Security-Policy"]
        assert "script-src 'self';" in policy + ";"
        assert "unsafe-eval" not in policy
        html = as_bob.get("/runs").content.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)", html)
        assert not re.search(r"\son\w+=", html)
