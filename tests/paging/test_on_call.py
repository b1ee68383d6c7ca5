"""Who has the pager, on every page; an outside address that is slow or wrong makes no page wait."""

import re
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.utils import timezone

from andon.signing import new_secret
from incidents.paging import deadman, on_call
from incidents.paging.ladder import PagingError, Rotation, read
from incidents.paging.models import OnCallAnswer, OnCallTurn
from incidents.refused import Refused
from tests.config.up import ROOT

DOCS = ROOT / "docs" / "paging.md"
START = datetime(2026, 11, 2, 9, tzinfo=UTC)


class TestTheList:
    def test_people_follow_each_other_by_the_week(self):
        turns = Rotation(("mira", "jonas", "priya"), START)
        names = [on_call.of_list(turns, START + timedelta(days=day)).name for day in (0, 6.99, 7, 14, 21)]
        assert names == ["mira", "mira", "jonas", "priya", "mira"]
        holder = on_call.of_list(turns, START + timedelta(days=8))
        assert (holder.until, holder.following) == (START + timedelta(days=14), "priya")

    def test_before_it_starts_nobody_is(self):
        assert on_call.of_list(Rotation(("mira",), START), START - timedelta(seconds=1)) is None


class TestTheFile:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("steps = 3", "steps"),
            ("nonsense = 1", "nonsense"),
            ('steps = [{after_min = 0, channels = ["no-such"]}]', "there is no channel 'no-such'"),
            ("steps = [{after_min = 0, channels = []}]", "names no channel"),
            ('steps = [{after_min = -1, channels = ["on-call"]}]', "after_min must rise"),
            ('[channels.a]\nkind = "pigeon"\naddress = "x"', "pigeon"),
            ('[channels.a]\nkind = "webhook"\naddress = "http://x/"', "secret"),
            ('[channels.a]\nkind = "webhook"\naddress = "http://x/"\nsecret = "%%"', "whsec_"),
            ('[channels.a]\nkind = "alertmanager"\naddress = "file:///etc/passwd"', "expected http"),
            ('[channels.a]\nkind = "apprise"', "address"),
            ('[channels.on-call]\nkind = "apprise"\naddress = "json://x"', "on-call"),
            ("repeat_min = 0.1", "repeat_min"),
            ("[on_call]\npeople = []\nstarts = 2026-01-01T00:00:00Z", "needs people"),
        ],
    )
    def test_what_it_cannot_mean_is_named_with_its_place(self, tmp_path, text, says):
        path = tmp_path / "paging.toml"
        path.write_text(text)
        with pytest.raises(PagingError, match=re.escape(says)):
            read(str(path))

    def test_secrets_may_lie_in_files_beside_it_and_stand_in_no_repr(self, tmp_path):
        (tmp_path / "secret").write_text("whsec_c2VjcmV0IG9mIGEgd2ViaG9vaywgMzIgYnl0ZXMhIQ==\n")
        path = tmp_path / "paging.toml"
        path.write_text('[channels.a]\nkind = "webhook"\naddress = "http://x/"\nsecret_file = "secret"')
        channel = read(str(path)).channels["a"]
        assert channel.secret.startswith("whsec_")
        assert "whsec_" not in repr(channel)

    def test_the_file_of_the_docs_is_one(self, tmp_path):
        block = re.search(r"^```toml\n(.*?)^```$", DOCS.read_text("utf-8"), re.M | re.S)[1]
        path = tmp_path / "paging.toml"
        path.write_text(block)
        for name in re.findall(r'"([\w-]+\.address)"', block):
            (tmp_path / name).write_text("json://127.0.0.1:1/")
        (tmp_path / "ops-chat.secret").write_text(new_secret())
        file = read(str(path))
        assert file.ladder("default").steps[2].channels == ("lead-phone", "alertmanager")
        assert file.ladder("vision").steps[0].channels == ("ops-chat",)
        assert file.ladder("vision").on_call == file.default.on_call
        assert file.ladder("vision").repeat_min == 15
        assert file.of_person("mira.k") == ["mira-phone"]

    @pytest.mark.django_db
    def test_a_file_that_breaks_leaves_the_last_good_one_in_force_and_says_so(self, team, file, as_member):
        assert as_member("mira").get("/on-call").status_code == 200
        file.path.write_text("steps = 3")
        words = text(as_member("mira").get("/on-call"))
        assert "mira is on call" in words
        assert "paging.toml" in words
        assert "On call mira" in words


@pytest.fixture
def as_member(team):
    """A browser in which somebody of the team is signed in."""

    def client(name):
        one = Client()
        one.force_login(getattr(team, name))
        return one

    return client


def text(response):
    plain = re.sub(r"<(script|style|title)\b.*?</\1>", " ", response.content.decode(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", plain)).replace("&#x27;", "'").replace(" .", ".")


@pytest.mark.django_db
class TestTheExternalAddress:
    def asked(self, settings, receiver, answer, status=200):
        settings.ONCALL_URL = receiver.url("/who")
        receiver.answer, receiver.status = answer, status
        OnCallAnswer.objects.update(asked_at=timezone.now() - timedelta(minutes=2))
        on_call.ask_external()

    @pytest.mark.parametrize(
        ("answer", "name"),
        [
            (b'{"name": "jonas", "until": "2030-01-01T00:00:00Z", "next": "priya"}', "jonas"),
            (b"jonas\n", "jonas"),
            (b'"jonas"', "jonas"),
        ],
    )
    def test_its_answer_goes_before_the_list(self, settings, file, project, hook, answer, name):
        self.asked(settings, hook, answer)
        assert on_call.of_project(project).name == name

    @pytest.mark.parametrize(
        ("answer", "status"),
        [
            (b"<html>sign in</html>", 200),
            (b'{"name": 3}', 200),
            (b"[]", 200),
            (b"", 200),
            (b"\xff\xfe", 200),
            (b"two\nlines", 200),
            (b'{"name": "mallory"}', 500),
            (b'{"name": "mallory"}', 302),
            (b"x" * 100_000, 200),
        ],
    )
    def test_a_wrong_answer_changes_nothing_and_is_said(
        self, settings, file, project, hook, as_member, answer, status
    ):
        self.asked(settings, hook, b"jonas")
        self.asked(settings, hook, answer, status)
        assert on_call.of_project(project).name == "jonas"
        words = text(as_member("mira").get("/system"))
        assert "the on-call address has not answered since" in words
        assert "On call jonas" in words

    def test_an_old_answer_is_shown_with_its_age(self, settings, file, project, hook, as_member):
        self.asked(settings, hook, b"jonas")
        OnCallAnswer.objects.update(answered_at=timezone.now() - timedelta(minutes=6))
        holder = on_call.of_project(project)
        assert holder.warn.startswith("no answer since ")
        assert f'title="{holder.warn}"' in as_member("mira").get("/runs").content.decode()

    def test_no_page_asks_it_and_none_waits_for_it(self, settings, file, hook, as_member):
        settings.ONCALL_URL = hook.url("/who")
        never = threading.Event()
        hook.before = lambda: never.wait(30)
        for address in ("/runs", "/incidents", "/on-call", "/system"):
            assert as_member("mira").get(address).status_code == 200
        assert hook.got == []
        never.set()

    def test_it_is_asked_once_a_minute_however_many_sweeps_there_are(self, settings, file, hook):
        self.asked(settings, hook, b"jonas")
        for _ in range(5):
            on_call.ask_external()
        assert len(hook.got) == 1

    def test_a_slow_one_costs_the_worker_its_five_seconds_and_no_more(
        self, settings, file, project, hook, monkeypatch
    ):
        monkeypatch.setattr(on_call, "_TIMEOUT_S", 0.2)
        never = threading.Event()
        hook.before = lambda: never.wait(10)
        settings.ONCALL_URL = hook.url("/who")
        on_call.ask_external()
        never.set()
        assert OnCallAnswer.objects.get().error == "no whole answer within 0.2 s"
        assert on_call.of_project(project) is None


@pytest.mark.django_db
class TestThePage:
    def test_it_says_who_what_and_over_which_channels_and_no_address(self, team, file, world, as_member):
        deadman.do_paging_work()
        answer = as_member("tomas").get("/on-call")
        words = text(answer)
        for expected in (
            "mira is on call until",
            "pt-13b-web3: Loss spike that did not recover",
            "nobody yet",
            "mira-phone",
            "took the last message",
            "never took a message",
            "at once on-call; after 5 min ops; after 20 min spare;",
            "every 15 min until somebody has it",
        ):
            assert expected in words, expected
        for channel in file.channels.values():
            assert channel["address"] not in answer.content.decode()
        assert "whsec_" not in answer.content.decode()

    def test_a_member_takes_the_pager_and_the_frame_says_so(self, team, file, project, as_member):
        client = as_member("tomas")
        assert (
            client.post("/on-call/take", {"project": "default", "to": "tomas", "hours": "4"}).status_code
            == 302
        )
        assert "On call tomas" in text(client.get("/runs"))
        turn = OnCallTurn.objects.get()
        assert turn.made_by == team.tomas
        assert timedelta(hours=3.9) < turn.ends_at - turn.starts_at <= timedelta(hours=4)

    @pytest.mark.parametrize(
        ("who", "to", "hours", "status"),
        [
            ("vera", "vera", "4", 403),
            ("tomas", "vera", "4", 422),
            ("tomas", "charlie", "4", 422),
            ("tomas", "nobody", "4", 422),
            ("tomas", "tomas", "9999", 422),
            ("charlie", "charlie", "4", 404),
        ],
    )
    def test_who_may_not_does_not(self, team, file, as_member, who, to, hours, status):
        answer = as_member(who).post("/on-call/take", {"project": "default", "to": to, "hours": hours})
        assert answer.status_code == status
        assert not OnCallTurn.objects.exists()

    def test_a_stranger_sees_nobody_and_nothing(self, team, file, world, as_member):
        deadman.do_paging_work()
        words = text(as_member("charlie").get("/on-call"))
        assert "pt-13b" not in words
        assert "mira" not in words
        assert "ops" not in words
        assert "On call: nobody" in words

    def test_somebody_is_paged_from_the_incident(self, team, file, world, as_member, phone):
        deadman.do_paging_work()
        address = f"/incidents/{world.incident().pk}/page"
        assert "jonas, no channel" in text(as_member("tomas").get(address))
        assert as_member("tomas").post(address, {"to": "jonas", "why": "x"}).status_code == 409
        assert as_member("vera").post(address, {"to": "mira", "why": "x"}).status_code == 403
        assert as_member("tomas").post(address, {"to": "mira", "why": "look at layer 6"}).status_code == 302
        deadman.do_paging_work()
        assert phone.got[-1].document["title"] == "pt-13b-web3: tomas asks for you"

    def test_a_turn_of_no_length_or_of_a_month_is_refused(self, team, project):
        for hours in (0, -1, 24 * 30):
            with pytest.raises(Refused):
                on_call.take(
                    project=project,
                    person=team.tomas,
                    who=team.tomas,
                    until=timezone.now() + timedelta(hours=hours),
                )

    def test_without_a_file_it_says_that_nobody_is_paged(self, team, as_member):
        words = text(as_member("mira").get("/system"))
        assert "ANDON_PAGING_FILE is not set: nobody is paged" in words
        assert "On call: nobody" in words


@pytest.mark.django_db
class TestTheCommand:
    def test_it_prints_the_ladder_without_addresses_and_proves_the_way(self, team, file, hook, phone, capsys):
        call_command("paging")
        said = capsys.readouterr().out
        assert "default: on call mira" in said
        assert "  after 5 min: ops" in said
        assert "127.0.0.1" not in said
        call_command("paging", "ops", "mira-phone", test=True)
        assert capsys.readouterr().out.endswith("ops: sent\nmira-phone: sent\n")
        assert hook.got[0].document["data"]["title"] == "Andon: test of the paging path"
        assert phone.got[0].document["title"] == "Andon: test of the paging path"

    def test_a_channel_that_does_not_take_it_fails_the_command_and_stands_on_the_system_page(
        self, team, file, spare, as_member
    ):
        spare.status = 401
        with pytest.raises(SystemExit, match="1"):
            call_command("paging", test=True)
        words = text(as_member("mira").get("/system"))
        assert "spare fails, first" in words
        assert "answered 401" in words

    def test_without_a_file_or_with_a_wrong_one_it_says_so(self, team, file, settings):
        file.path.write_text("steps = 3")
        with pytest.raises(CommandError, match="steps"):
            call_command("paging")
        settings.PAGING_FILE = ""
        with pytest.raises(CommandError, match="ANDON_PAGING_FILE is not set"):
            call_command("paging")
