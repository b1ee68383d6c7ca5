"""The page that needs no worker: the sweep is missed, the worker is dead, the database is silent."""

import signal
import sys
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models import F
from django.utils import timezone

from config.celery import app
from config.embedded import processes
from config.embedded.valkey import free_port
from incidents.paging import deadman
from incidents.paging.models import Beat, Delivery, Page
from runs import work
from tests import servers
from tests.config.up import ROOT, clean_environment
from tests.incidents.world import held
from tests.paging.receivers import until

AT_ONCE = 'steps = [{after_min = 0, channels = ["ops"]}]'


def titles(receiver):
    return [got.document["data"]["title"] for got in receiver.got]


def long_ago():
    return timezone.now() - timedelta(hours=1)


@pytest.mark.django_db
class TestLook:
    def test_a_sweep_in_time_pages_nobody(self, file, hook):
        file.write(AT_ONCE)
        deadman.beat()
        assert deadman.look(long_ago()) == ""
        assert hook.got == []
        assert not Page.objects.exists()

    def test_two_missed_sweeps_page_once_without_any_worker_and_its_return_ends_it(self, file, hook):
        file.write(AT_ONCE)
        Beat.objects.create(name=deadman.SWEEP, at=timezone.now() - timedelta(seconds=121))
        assert deadman.look(long_ago()) == "no sweep for 2\u00a0min"
        deadman.look(long_ago())
        assert titles(hook) == [deadman.TITLE]
        deadman.beat()
        assert deadman.look(long_ago()) == ""
        work.run_due()
        assert titles(hook) == [deadman.TITLE, f"Over: {deadman.TITLE}"]

    def test_one_missed_sweep_is_none(self, file, hook):
        Beat.objects.create(name=deadman.SWEEP, at=timezone.now() - timedelta(seconds=110))
        assert deadman.look(long_ago()) == ""

    def test_a_server_that_only_just_started_is_given_its_time(self, file, hook):
        assert deadman.look(timezone.now() - timedelta(seconds=5)) == ""

    def test_what_else_must_page_meanwhile_pages_too(self, project, file, hook):
        file.write(AT_ONCE)
        held(project)
        Beat.objects.create(name=deadman.SWEEP, at=long_ago())
        deadman.look(long_ago())
        assert sorted(titles(hook)) == [deadman.TITLE, "pt-13b-web3: Loss spike that did not recover"]

    def test_the_command_says_so_by_its_status(self, file, hook, capsys):
        file.write(AT_ONCE)
        with pytest.raises(SystemExit, match="1"):
            call_command("deadman")
        assert titles(hook) == [deadman.TITLE]
        deadman.beat()
        call_command("deadman")
        assert "the sweep runs" in capsys.readouterr().out


class TestWithoutADatabase:
    """No database mark: a query here is an error of the test."""

    def outage(self, minutes):
        return deadman.Outage(datetime.now(UTC) - timedelta(minutes=minutes))

    def test_it_sends_straight_from_the_file_by_its_steps_and_once(self, file, phone, hook, spare):
        outage = self.outage(2.1)
        outage.tell(datetime.now(UTC))
        outage.tell(datetime.now(UTC))
        assert (len(phone.got), len(hook.got)) == (1, 0)
        assert phone.got[0].document["title"] == "Andon's database does not answer"
        outage.tell(datetime.now(UTC) + timedelta(minutes=5))
        assert titles(hook) == ["Andon's database does not answer"]
        outage.over(datetime.now(UTC))
        assert titles(hook)[-1] == "Over: Andon's database does not answer"
        assert spare.got == []

    def test_it_is_one_outage_for_whoever_looks_next(self, file, hook, settings, tmp_path):
        """A process that starts anew, a command of cron: the same keys, nothing twice."""
        settings.DATA_DIR = tmp_path
        file.write(AT_ONCE)
        for minute in range(6):
            known = deadman.Outage.known(deadman.directory() / deadman.OUTAGE)
            if known is not None:
                known.since -= timedelta(minutes=1)
                known.keep()
            assert deadman.look_and_tell(long_ago(), "it hangs") == f"{deadman.SILENT}: it hangs"
            assert len(hook.got) == (1 if minute >= 2 else 0)

    def test_a_short_outage_wakes_nobody(self, file, phone):
        self.outage(1).tell(datetime.now(UTC))
        assert phone.got == []

    def test_what_was_not_taken_is_tried_again(self, file, hook):
        file.write(AT_ONCE)
        outage, hook.status = self.outage(3), 500
        outage.tell(datetime.now(UTC))
        hook.status = 200
        outage.tell(datetime.now(UTC) + timedelta(seconds=31))
        outage.tell(datetime.now(UTC) + timedelta(seconds=62))
        assert len(hook.got) == 2
        assert len({got.headers["webhook-id"] for got in hook.got}) == 1


@pytest.mark.django_db
def test_once_it_answers_again_those_who_were_told_are_told(file, hook, settings, tmp_path):
    settings.DATA_DIR = tmp_path
    file.write(AT_ONCE)
    deadman.Outage(datetime.now(UTC) - timedelta(minutes=3), deadman.directory() / deadman.OUTAGE).keep()
    deadman.look_and_tell(long_ago(), "it hangs")
    deadman.beat()
    assert deadman.look_and_tell(long_ago()) == ""
    assert deadman.look_and_tell(long_ago()) == ""
    assert titles(hook) == ["Andon's database does not answer", "Over: Andon's database does not answer"]


@pytest.mark.django_db(transaction=True)
def test_with_the_worker_killed_the_web_process_pages(project, file, hook, tmp_path):
    """Real processes: a worker that sweeps until it is killed, and a web process that goes on alone."""
    file.write(AT_ONCE)
    broker = servers.start_valkey(tmp_path / "broker")
    name = connection.settings_dict
    environment = clean_environment(
        ANDON_DATABASE_URL=f"postgresql://{name['USER']}:{quote(name['PASSWORD'])}@/{name['NAME']}"
        f"?host={quote(name['HOST'], safe='')}",
        ANDON_BROKER_URL=broker.url(),
        ANDON_DATA_DIR=str(tmp_path / "data"),
        ANDON_PAGING_FILE=str(file.path),
        ANDON_SWEEP_MISSED_S="10",
        ANDON_SECRET_KEY="x" * 50,
        DIE_WITH_PARENT="1",  # the server's own worker process goes with it
    )
    python, log = [sys.executable, "-m"], (tmp_path / "log").open("ab")
    started = []

    def start(*command):
        started.append(
            processes.spawn([*python, *command], environment=environment, directory=ROOT, output=log)
        )
        return started[-1]

    try:
        worker = start("celery", "-A", "config.celery", "worker", "--pool", "threads", "--concurrency", "1")
        start("granian", "--interface", "wsgi", "--port", str(free_port()), "config.wsgi:application")
        with app.connection(broker.url()) as bell:
            app.send_task("incidents.tasks.sweep_pages", connection=bell)
        until("the worker sweeps", Beat.objects.first, 40)
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)
        held(project)
        assert hook.got == []
        Beat.objects.update(at=F("at") - timedelta(minutes=5))
        until("two pages", lambda: Delivery.objects.filter(state="sent").count() == 2, 40)
    finally:
        for process in started:
            processes.stop(process, signal.SIGKILL, 5)
        broker.stop()
        log.close()
    assert sorted(titles(hook)) == [deadman.TITLE, "pt-13b-web3: Loss spike that did not recover"]
