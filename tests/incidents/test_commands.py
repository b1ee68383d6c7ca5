"""Ready commands: whatever a trainer calls its node, a shell gets exactly one word for it."""

import subprocess

import pytest
from django.test import Client, override_settings
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from andon.links import parse
from incidents import commands
from incidents.models import Plan
from runs.models import Attempt
from tests.incidents.world import World

pytestmark = pytest.mark.django_db

# Instead of ssh: says its own words, then lets another shell read the last one, as the other end does.
_SHELLS = 'ssh() { printf "%s\\n" "$#" "$2"; sh -c "set -- $3"\'; printf "%s\\n" "$@"\'; }; sudo() { :; }; '


def failed(project, node, **more):
    world = World(project)
    world.steps(19, 20)
    world.finding("nonfinite", step=20, lanes=[3], view="local")
    nodes = [{"node": node, "ranks": [2, 3], "gpu_uuids": ["GPU-a", "GPU-b"], **more}]
    Attempt.objects.filter(run=world.run).update(nodes=nodes)
    return world


def ready(world):
    return commands.of_incident(world.incident())


class TestCommands:
    def test_names_are_filled_in(self, project, team):
        texts = [one.text for one in ready(failed(project, "node-07")).commands]
        number = texts[0].split()[3]
        assert texts[:2] == [
            f"python manage.py export_bag {number} incident-{number}.zip",
            f"andon verify incident-{number}.zip",
        ]
        assert texts[3].startswith("ssh -- node-07 'sudo journalctl -k --utc '\"'\"'--since=")
        assert texts[4] == "ssh -- node-07 'nvidia-smi -q -i GPU-b'"
        assert texts[5] == "ssh -- node-07 'dcgmi diag -r 3 -i 1 -j'"

    @pytest.mark.parametrize(
        "node", ["a b", "$(touch x)", "`id`", "x;id", "a'b\"c", "a\\", "*", "~", "a&b|c>d"]
    )
    def test_a_shell_takes_a_hostile_name_as_one_word(self, project, node):
        text = next(one.text for one in ready(failed(project, node)).commands if "nvidia-smi" in one.text)
        done = subprocess.run(["sh", "-c", _SHELLS + text], capture_output=True, text=True, check=True)
        assert done.stdout.split("\n") == ["3", node, "nvidia-smi", "-q", "-i", "GPU-b", ""]

    @pytest.mark.parametrize(
        "node", ["-oProxyCommand=id", "a\nrm -rf x", "a\x1b[2J", "a\u202eb", "node\u200b", "n" * 256, "нода"]
    )
    def test_a_name_that_no_terminal_should_get_makes_no_command(self, project, node):
        found = ready(failed(project, node))
        assert not any("ssh" in one.text for one in found.commands)
        assert "its name is not plain text" in found.left_out
        assert "\n" not in found.left_out
        assert "\u202e" not in found.left_out

    def test_a_hostile_gpu_is_named_by_its_number(self, project):
        world = failed(project, "node-07")
        nodes = [{"node": "node-07", "ranks": [2, 3], "gpu_uuids": ["x", "-f\x1b"]}]
        Attempt.objects.filter(run=world.run).update(nodes=nodes)
        assert "ssh -- node-07 'nvidia-smi -q -i 1'" in [one.text for one in ready(world).commands]

    @pytest.mark.parametrize(
        ("launch", "numbers", "there"),
        [
            ({}, {"batch_samples": 64}, True),
            ({"parallelism": "ddp"}, {"batch_samples": 64}, False),  # its own loader skips
            ({}, {}, False),
        ],
    )
    def test_a_skip_window_is_megatrons_arguments(self, project, launch, numbers, there):
        world = failed(project, "node-07")
        Attempt.objects.filter(run=world.run).update(data=launch)
        plan = {"kind": Plan.Kind.ROLLBACK_AND_SKIP, "skip": {"from": 0, "to": 640}, "numbers": numbers}
        world.incident().plans.create(number=99, made_at=timezone.now(), **plan)
        texts = [one.text for one in ready(world).commands]
        assert ("andon megatron args permit.json --global-batch-size 64" in texts) is there

    def test_an_unknown_node_is_said(self, world):
        assert ready(world).left_out == "No command names a node: it is not known."


class TestLinks:
    TEMPLATES = parse(
        "Grafana=https://g.example/d?n={node}&from={from_ms}&to={to_ms} W_and_B=https://w.example/{run} G=https://x/{gpu_uuid}"
    )

    def test_the_page_links_out_with_the_time_range(self, project, team):
        world = failed(project, 'n"><script>')
        client = Client()
        client.force_login(team.vera)
        with override_settings(LINKS=self.TEMPLATES):
            html = client.get(f"/incidents/{world.incident().pk}").content.decode()
            links = dict(ready(world).links)
        assert links["W and B"] == "https://w.example/pt-13b-web3"
        assert links["Grafana"].startswith("https://g.example/d?n=n%22%3E%3Cscript%3E&from=1")
        assert 'rel="noopener noreferrer">W and B</a>' in html
        assert 'n"><script>' not in html
        since, until = (int(part.partition("=")[2]) for part in links["Grafana"].split("&")[1:])
        assert until - since == 40 * 60 * 1000

    def test_a_link_whose_field_is_not_known_is_left_out(self, world):
        with override_settings(LINKS=self.TEMPLATES):
            assert [name for name, _ in ready(world).links] == ["W and B"]


@given(st.text())
def test_no_unsafe_name_is_safe(name):
    if commands.is_safe(name):
        assert name.isascii()
        assert name.isprintable()
        assert name[0] != "-"
