"""Pages of nodes: which are in trouble, what happened on one, and nothing of what a person may not see."""

import re

import numpy as np
import pytest

from andon.wire import Frame, encode_frame
from runs.actions import create_run
from runs.models import FleetReport, NodeStay, RunProgress
from tests.pages import seed
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)


def launch(slug, secret, attempt, names):
    nodes = [
        {"node": name, "ranks": f"{8 * n}-{8 * n + 7}", "gpu_uuids": [f"GPU-{name}-{g}" for g in range(8)]}
        for n, name in enumerate(names)
    ]
    data = {"world_size": 8 * len(names), "nodes": nodes}
    seed.post_events(slug, secret, [{"type": "attempt.launched", "attempt": attempt, "data": data}])


def reading(slug, secret, attempt, step, node, **metrics):
    lanes = len(next(iter(metrics.values())))
    frame = Frame(
        stream="node",
        attempt=attempt,
        node=node,
        step=np.full(lanes, step, np.int64),
        lane=np.arange(lanes, dtype=np.int32),
        metrics={name: np.array(values, np.float64) for name, values in metrics.items()},
    )
    seed.post(slug, secret, "frames", *encode_frame(frame))


@pytest.fixture
def fleet(project, alice, bob):
    """Two launches of a run, in which node-02 went and node-09 came; node-01 is in trouble."""
    made = create_run(name="web3")
    launch("web3", made.secret, 1, ["node-00", "node-01", "node-02"])
    seed.post_events("web3", made.secret, [{"type": "step", "step": 5, "data": {"loss": 2.0}}])
    launch("web3", made.secret, 2, ["node-00", "node-01", "node-09"])
    hardware = {"type": "hardware.xid", "attempt": 2, "node": "node-01", "step": 7, "rank": 11}
    seed.post_events(
        "web3",
        made.secret,
        [
            {**hardware, "data": {"xid": 94, "gpu": 3}},
            {
                "type": "node.state",
                "attempt": 2,
                "node": "node-09",
                "data": {"state": "suspect", "reason": "slow"},
            },
            {
                "type": "preflight.report",
                "attempt": 2,
                "node": "node-00",
                "data": {"passed": False, "busbw_gbps": 331, "ratio": 0.78, "min_ratio": 0.9},
            },
            {"type": "step", "step": 7, "attempt": 2, "data": {"loss": 2.0}},
        ],
    )
    for step, errors in ((7, 100), (8, 160)):
        reading("web3", made.secret, 2, step, "node-01", gpu_temp_c=[70, 91], nvlink_errors=[0, errors])
    seed.work_through()
    from runs.models import Work

    Work.objects.filter(kind="grid").update(not_before=made.run.created_at)
    seed.work_through()
    return made


class TestList:
    def test_an_empty_one_says_how_a_node_becomes_known(self, as_alice):
        words = text_of(as_alice.get("/nodes"))
        assert "No node has reported" in words
        assert "attempt.launched" in words

    def test_the_most_troubled_stand_first_with_what_is_wrong(self, as_bob, fleet):
        words = text_of(as_bob.get("/nodes"))
        assert words.index("node-09") < words.index("node-01") < words.index("node-00")
        assert "suspect" in words
        assert "1 Xid" in words
        assert "91 °C" in words
        assert "60" in words  # link errors: what they rose by, not where the counter stands
        assert "160" not in words

    def test_what_left_and_what_came_with_a_launch_is_named(self, as_bob, fleet):
        words = text_of(as_bob.get("/nodes?show=swapped"))
        assert "node-02" in words
        assert "node-09" in words
        assert "node-01" not in words

    def test_search_filter_and_pages_narrow_it(self, as_bob, fleet):
        assert "node-00" not in text_of(as_bob.get("/nodes?q=-09"))
        assert "No node fits this filter" in text_of(as_bob.get("/nodes?q=zzz"))
        assert "node-00" not in text_of(as_bob.get("/nodes?show=trouble"))
        assert as_bob.get("/search?q=node-01")["Location"] == "/nodes/node-01"
        assert "node-01" in text_of(as_bob.get("/search?q=node-0"))

    def test_a_poll_that_finds_nothing_new_is_a_304(self, as_bob, fleet):
        tag = as_bob.get("/fragments/nodes")["ETag"]
        assert as_bob.get("/fragments/nodes", headers={"if-none-match": tag}).status_code == 304

    def test_2048_nodes_take_as_many_statements_as_three(
        self, as_bob, project, django_assert_max_num_queries
    ):
        made = create_run(name="fleet")
        launch("fleet", made.secret, 1, [f"n{n:04d}" for n in range(2_048)])
        assert NodeStay.objects.count() == 2_048
        with django_assert_max_num_queries(22):
            words = text_of(as_bob.get("/nodes"))
        assert "2,048" in words
        assert "page 1 of 21" in words
        assert "n2047" in text_of(as_bob.get("/nodes?page=21"))

    def test_a_node_that_others_of_its_run_outlived_is_silent(self, as_bob, fleet):
        from datetime import timedelta

        from django.utils import timezone

        now = timezone.now()
        heard = {"node-00": now, "node-01": now - timedelta(minutes=3)}
        stamps = {name: at.isoformat().replace("+00:00", "Z") for name, at in heard.items()}
        RunProgress.objects.filter(run=fleet.run).update(nodes=stamps, last_post_at=now)
        words = text_of(as_bob.get("/nodes?show=silent"))
        assert "node-01" in words
        assert "node-00" not in words


class TestOne:
    def test_it_tells_what_happened_what_it_read_and_where_it_was(self, as_bob, fleet):
        words = text_of(as_bob.get("/nodes/node-01"))
        assert "Xid 94" in words
        assert "highest 91.00 °C" in words.replace("\u00a0", " ") or "highest 91.00" in words
        assert "nvlink errors +60" in words
        assert "web3, 2" in words.replace(" ,", ",")
        assert "8–15" in words

    def test_the_newest_preflight_is_told_with_what_it_measured(self, as_bob, fleet):
        words = text_of(as_bob.get("/nodes/node-00"))
        told = re.search(r"preflight .{60}", words)
        assert told is not None
        assert told[0].startswith("preflight failed, busbw gbps 331, min ratio 0.9, ratio 0.78"), told[0]
        assert "no preflight was told" in text_of(as_bob.get("/nodes/node-01"))

    def test_a_swap_is_told_on_both_nodes(self, as_bob, fleet):
        assert "out after it" in text_of(as_bob.get("/nodes/node-02"))
        assert "swapped in" in text_of(as_bob.get("/nodes/node-09"))

    def test_an_incident_that_began_on_it_is_linked(self, as_bob, incident):
        link = f'href="/incidents/{incident.id}">'
        assert f"{link}incident" in as_bob.get("/nodes/node-01").content.decode()
        assert f"{link}incident" not in as_bob.get("/nodes/node-00").content.decode()
        assert f"{link}{incident.id}</a>" in as_bob.get("/nodes").content.decode()

    def test_what_the_fleet_reported_stands_there(self, as_bob, fleet, project):
        from django.utils import timezone

        now = timezone.now()
        FleetReport.objects.create(
            project=project,
            source="alertmanager",
            identity="x",
            state="firing",
            severity="critical",
            title="<b>PSU</b>",
            node="node-00",
            received_at=now,
            last_at=now,
        )
        page = as_bob.get("/nodes/node-00").content.decode()
        assert "alertmanager: &lt;b&gt;PSU&lt;/b&gt;" in page

    @pytest.mark.parametrize("name", ["nowhere", "a/b", "%3Cscript%3E", "node-01%0A"])
    def test_an_unknown_one_is_404(self, as_bob, fleet, name):
        assert as_bob.get(f"/nodes/{name}").status_code == 404

    def test_strangers_see_neither(self, as_charlie, fleet):
        assert "node-09" not in text_of(as_charlie.get("/nodes"))
        assert as_charlie.get("/nodes/node-01").status_code == 404
        assert "Nothing found" in text_of(as_charlie.get("/search?q=node-01"))
