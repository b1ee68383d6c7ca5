"""The ledger's pages: filters, older rows, and only what a person may see."""

import re

import pytest
from django.test import Client

from incidents import ledger, ledger_page
from tests.incidents.test_ledger import WHOLE
from tests.incidents.world import World


@pytest.fixture
def vera(team):
    client = Client()
    client.force_login(team.vera)
    return client


@pytest.fixture
def run(project):
    run = World(project).run
    for number in range(1, 6):
        ledger.append(
            run=run,
            **{**WHOLE, "action": "quarantine" if number % 2 else "restart", "attempt": number},
        )
    return run


def seqs(answer):
    return [int(seq) for seq in re.findall(r'<span class="under ref">(\d+) ', answer.content.decode())]


@pytest.mark.django_db
class TestPages:
    @pytest.mark.parametrize(
        ("query", "rows"),
        [
            ("", [5, 4, 3, 2, 1]),
            ("?action=restart", [4, 2]),
            ("?rule=CANARY", [5, 4, 3, 2, 1]),
            ("?rule=nobody", []),
            ("?attempt=3", [3]),
            ("?incident=7", []),
            ("?attempt=x&incident=%00&before=y", [5, 4, 3, 2, 1]),
            ("?before=3", [2, 1]),
            ("?action=quarantine&before=5", [3, 1]),
        ],
    )
    def test_a_filter_shows_what_it_says(self, run, vera, query, rows):
        answer = vera.get(f"/runs/{run.slug}/ledger{query}")
        assert seqs(answer) == rows
        if not rows:
            assert "No row fits this filter" in answer.content.decode()

    def test_older_rows_follow_without_a_gap_and_keep_the_filter(self, run, vera, monkeypatch):
        monkeypatch.setattr(ledger_page, "PAGE_ROWS", 2)
        first = vera.get(f"/runs/{run.slug}/ledger?rule=canary")
        assert seqs(first) == [5, 4]
        link = re.search(r'href="(\?before=[^"]+)">Older rows', first.content.decode())[1]
        assert seqs(vera.get(f"/runs/{run.slug}/ledger{link.replace('&amp;', '&')}")) == [3, 2]

    def test_all_ledgers_page_over_runs_newest_first(self, run, vera, project, monkeypatch):
        other = World(project, "other").run
        ledger.append(run=other, **WHOLE)
        assert seqs(vera.get("/ledger"))[0] == 1
        assert seqs(vera.get("/ledger?run=OTHER")) == [1]
        monkeypatch.setattr(ledger_page, "PAGE_ROWS", 4)
        link = re.search(r'href="(\?before=[^"]+)">Older rows', vera.get("/ledger").content.decode())[1]
        assert seqs(vera.get(f"/ledger{link.replace('&amp;', '&')}")) == [2, 1]

    def test_a_stranger_sees_no_row(self, run, team):
        client = Client()
        client.force_login(team.charlie)
        assert seqs(client.get("/ledger")) == []
        assert client.get(f"/runs/{run.slug}/ledger").status_code == 404

    def test_budgets_stand_first(self, run, vera):
        words = vera.get(f"/runs/{run.slug}/ledger").content.decode()
        assert "holds 0 of 6" in words
        assert words.index("holds 0 of 6") < words.index("What did this run actually see")
