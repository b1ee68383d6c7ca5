"""Parts of the running server break under it: incidents, the broker, and many nodes at once."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from demo.check import until
from tests.faults.house import House, Poster, Reply, kill

pytestmark = pytest.mark.xdist_group("faults")
NAN = float("nan")
IN_TIME_S = 10.0  # a client without a limit hangs for more than a minute


@contextmanager
def refusing(house: House, table: str) -> Iterator[None]:
    """Let every insert into `table` fail."""
    house.sql(
        "CREATE FUNCTION broken_on_purpose() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'broken on purpose'; END $$"
    )
    house.sql(
        f"CREATE TRIGGER broken_on_purpose BEFORE INSERT ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION broken_on_purpose()"
    )
    try:
        yield
    finally:
        house.sql("DROP FUNCTION broken_on_purpose CASCADE")


def test_broken_incidents_cost_neither_data_nor_hold(house: House, poster: Poster):
    run = house.run_id(poster.run)
    poster.step(1, rank=0, loss=2.0)
    with refusing(house, "incidents_incident"):
        for step, rank in ((2, 0), (2, 1), (3, 0)):
            answer = poster.step(step, rank=rank, loss=NAN)
            assert answer.status == 202
            assert (answer.directive["kind"], answer.directive["incident"]) == ("hold", None)
        assert house.incidents(poster.run) == []
    assert house.one("SELECT count(*) FROM runs_event WHERE run_id = %s", run) == 4
    until("the sweep opens the incident", lambda: house.incidents(poster.run), 60)
    ((incident, state, _),) = house.incidents(poster.run)
    assert state == "open"
    answer = poster.step(4, rank=0, loss=2.0)
    assert answer.directive["kind"] == "hold"
    assert answer.directive["incident"] == str(incident)
    until(
        "every finding has its incident",
        lambda: (
            house.sql("SELECT DISTINCT incident FROM runs_finding WHERE run_id = %s", run)
            == [(str(incident),)]
        ),
        30,
    )
    assert len(house.incidents(poster.run)) == 1


def test_a_broker_that_accepts_and_never_answers_delays_no_post(house: House, poster: Poster):
    run = house.run_id(poster.run)
    poster.step(1, rank=0, loss=2.0)
    broker = house.up.pid_of("valkey-server")
    kill(broker, signal.SIGSTOP)
    try:
        answers = [poster.step(step, rank=0, loss=2.0) for step in range(2, 12)]
        answers.append(poster.step(12, rank=1, loss=NAN))
        answers += [poster.step(12, rank=rank, loss=2.0) for rank in (2, 3)]
    finally:
        kill(broker, signal.SIGCONT)
    assert [answer.status for answer in answers] == [202] * 13
    assert answers[10].directive["kind"] == "hold"
    assert max(answer.took_s for answer in answers) < IN_TIME_S
    assert house.one("SELECT count(*) FROM runs_event WHERE run_id = %s", run) == 14
    all_work_is_done(house, poster)


def test_a_killed_broker_loses_nothing(house: House, poster: Poster):
    run = house.run_id(poster.run)
    broker = house.up.pid_of("valkey-server")
    kill(broker)
    answers = [poster.step(step, rank=0, loss=2.0) for step in range(1, 6)]
    answers.append(poster.step(6, rank=1, loss=NAN))
    assert [answer.status for answer in answers] == [202] * 6
    assert answers[-1].directive["kind"] == "hold"
    assert max(answer.took_s for answer in answers) < IN_TIME_S
    assert house.one("SELECT count(*) FROM runs_event WHERE run_id = %s", run) == 6
    all_work_is_done(house, poster)
    assert house.up.pid_of("valkey-server") != broker


def all_work_is_done(house: House, poster: Poster) -> None:
    """The detectors looked at everything, and every unit of the freeze was taken by a worker."""
    run = house.run_id(poster.run)
    until("an incident", lambda: house.incidents(poster.run), 40)
    ((_, state, dossier),) = house.incidents(poster.run)
    assert state == "open"
    until(
        "nothing is left to look at",
        lambda: house.one("SELECT count(*) FROM runs_pending WHERE run_id = %s", run) == 0,
        60,
    )
    until(
        "the event log is sealed",
        lambda: (
            house.sql("SELECT state FROM evidence_item WHERE dossier_id = %s AND kind = 'event_log'", dossier)
            == [("sealed",)]
        ),
        60,
    )


@pytest.mark.parametrize("nodes", [64])
def test_a_storm_of_the_same_nan_is_one_incident(house: House, poster: Poster, nodes: int):
    ranks = [list(range(node * 8, node * 8 + 8)) for node in range(nodes)]
    launched = {
        "world_size": nodes * 8,
        "nodes": [{"node": f"node-{node:03}", "ranks": ranks[node]} for node in range(nodes)],
    }
    assert poster.events({"type": "attempt.launched", "attempt": 1, "data": launched}).status == 202
    ready = threading.Barrier(nodes)
    replies: list[Reply | None] = [None] * nodes

    def post(node: int) -> None:
        event = {
            "type": "step",
            "step": 100,
            "attempt": 1,
            "node": f"node-{node:03}",
            "rank": ranks[node][0],
            "data": {"loss": NAN, "nonfinite": 2},
        }
        body = json.dumps([event]).encode()
        headers = poster.headers(body)
        ready.wait(30)
        replies[node] = poster.post(body, headers=headers)

    threads = [threading.Thread(target=post, args=(node,)) for node in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    answered: list[Reply] = [reply for reply in replies if reply is not None]
    assert len(answered) == nodes
    assert {reply.status for reply in answered} == {202}
    assert {reply.directive["kind"] for reply in answered} == {"hold"}
    ((incident, _, _),) = house.incidents(poster.run)
    assert {reply.directive["incident"] for reply in answered} == {str(incident)}
    assert len({reply.directive["seq"] for reply in answered}) == 1
    run = house.run_id(poster.run)
    assert house.one("SELECT count(*) FROM evidence_dossier WHERE run_id = %s", run) == 1
    assert house.one("SELECT count(*) FROM runs_event WHERE run_id = %s AND type = 'step'", run) == nodes
    # The tie is named whole once the worker has looked: all nodes' first ranks, at one step.
    until(
        "first-bad names all ranks that tie",
        lambda: (
            house.one(
                "SELECT jsonb_array_length(first_bad->'ranks') FROM incidents_incident WHERE id = %s",
                incident,
            )
            == nodes
        ),
        60,
    )
