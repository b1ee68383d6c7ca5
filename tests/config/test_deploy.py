"""The real topology, as far as it can be checked without an engine: structure, secrets, references."""

import json
import re
import stat
import subprocess

import pytest
import yaml

from config import env
from tests.config.up import ROOT, clean_environment

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
ONE_SHOT = {"migrate", "bucket"}


def environment_of(service):
    return SERVICES[service].get("environment", {})


def test_the_topology_is_the_one_of_the_design():
    assert set(SERVICES) == {
        *("proxy", "web", "worker", "scheduler", "migrate", "postgres", "redis", "store", "bucket")
    }
    assert SERVICES["web"]["deploy"]["replicas"] == 2
    assert SERVICES["worker"]["deploy"]["replicas"] == 2
    assert "deploy" not in SERVICES["scheduler"]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - ONE_SHOT))
def test_every_service_that_stays_has_a_health_check_and_comes_back(name):
    check = SERVICES[name]["healthcheck"]
    assert check["test"]
    assert {"interval", "timeout", "retries"} <= set(check)
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_image_is_pinned_by_tag(name):
    image = SERVICES[name]["image"]
    tag = image.partition(":")[2]
    assert re.fullmatch(r"[\w.-]*\d+\.\d+[\w.-]*|RELEASE\.[\w-]+", tag), image
    assert tag != "latest"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_secret_stands_in_the_file_and_none_has_a_default(name):
    for variable, value in environment_of(name).items():
        assert ":-" not in str(value), f"{variable} has a default"
        if re.search(
            r"PASSWORD|SECRET|KEY|TOKEN|CREDENTIAL|DATABASE_URL|OWNER_URL|BROKER_URL|ROOT_USER", variable
        ):
            assert variable.endswith("_FILE"), f"{variable} is not read from a file"
            assert str(value).startswith("/run/secrets/"), variable
    # No user or password inside any URL or argument.
    assert not re.search(r"://[^/\s]*:[^/\s]*@", json.dumps(SERVICES[name]))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_secret_it_reads_is_mounted_and_declared(name):
    mounted = set(SERVICES[name].get("secrets", []))
    assert mounted <= set(COMPOSE["secrets"])
    read = set(re.findall(r"/run/secrets/(\w+)", json.dumps(SERVICES[name])))
    for volume in SERVICES[name].get("volumes", []):
        source = ROOT / volume.split(":")[0]
        if source.is_file():
            read |= set(re.findall(r"/run/secrets/(\w+)", source.read_text()))
    assert read <= mounted
    assert mounted - read == set()


@pytest.mark.parametrize("name", ["web", "worker", "scheduler", "migrate"])
def test_every_setting_it_gives_is_a_setting_of_andon(name):
    given = {variable for variable in environment_of(name) if variable.startswith("ANDON_")}
    env.refuse_unknown(dict.fromkeys(given, "x"))


def test_only_migrations_know_the_owner_of_the_tables():
    assert [name for name in SERVICES if "database_owner_url" in SERVICES[name].get("secrets", [])] == [
        "migrate"
    ]
    roles = (ROOT / "deploy" / "postgres" / "roles.sh").read_text()
    for role in ("andon_owner", "andon_app"):
        assert re.search(rf"CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE", roles)


@pytest.mark.parametrize("name", ["web", "worker", "scheduler"])
def test_nothing_starts_before_what_it_needs(name):
    needs = SERVICES[name]["depends_on"]
    assert needs["migrate"]["condition"] == "service_completed_successfully"
    assert needs["bucket"]["condition"] == "service_completed_successfully"
    assert needs["redis"]["condition"] == "service_healthy"
    assert SERVICES["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert SERVICES["bucket"]["depends_on"]["store"]["condition"] == "service_healthy"
    assert SERVICES["proxy"]["depends_on"]["web"]["condition"] == "service_healthy"


def test_only_the_proxy_is_reachable_from_outside():
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["proxy"]


def test_every_file_it_mounts_exists():
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), volume


def test_every_directory_the_image_copies_exists():
    for source in re.findall(r"^COPY (?!--from)(\S+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        assert (ROOT / source).exists(), source


def test_every_secret_is_made_private_once_and_kept(tmp_path):
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    (deploy / "make-secrets.sh").write_bytes((ROOT / "deploy" / "make-secrets.sh").read_bytes())
    run = ["sh", str(deploy / "make-secrets.sh")]
    subprocess.run(run, check=True, env=clean_environment(ANDON_PUBLIC_URL="https://andon.example.org"))
    made = {path.name: path.read_bytes() for path in (deploy / "secrets").iterdir()}
    assert set(made) == set(COMPOSE["secrets"])
    assert all(made.values())
    assert stat.S_IMODE((deploy / "secrets").stat().st_mode) == 0o700
    assert len(made["secret_key"].strip()) >= 50
    subprocess.run(run, check=True, env=clean_environment())
    assert {path.name: path.read_bytes() for path in (deploy / "secrets").iterdir()} == made


def test_packages_of_the_tests_stand_in_one_file():
    named = {
        line for line in (ROOT / "apt-packages.txt").read_text().splitlines() if not line.startswith("#")
    }
    assert {"radosgw", "ceph-mon", "ceph-osd", "ceph-common", "chromium", "pgbouncer"} <= named
