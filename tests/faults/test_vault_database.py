"""PostgreSQL dies while evidence is on its way into the store: the freeze completes once it is back."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.evidence import world
from tests.faults.demos import eventually
from tests.faults.house import House, kill
from tests.faults.shop import digests_of
from tests.faults.store_proxy import PATIENCE_S, How, StoreProxy
from tests.servers import S3

pytestmark = [pytest.mark.xdist_group("vault-faults"), pytest.mark.timeout(240)]
OPEN = (
    "from tests.evidence import world; run = world.make_run();"
    " world.commit(run, 900, {uri!r}, {table!r});"
    " print(world.open_dossier(run, rules=world.policy('last_good_checkpoint')).pk)"
)
CHECK = (
    "from evidence.custody import verify_custody; from evidence.models import Dossier;"
    " print([verify_custody(one) for one in Dossier.objects.all()])"
)


def test_a_database_that_is_killed_in_the_middle_of_a_freeze(
    build: Callable[..., House], s3_endpoint: S3, s3_bucket: str, tmp_path: Path
) -> None:
    proxy = StoreProxy(int(s3_endpoint.url.rpartition(":")[2]))
    place = proxy.url.removeprefix("http://")
    house = build(
        ANDON_VAULT_URL=f"s3+http://{s3_endpoint.access_key}:{s3_endpoint.secret_key}@{place}/{s3_bucket}",
        ANDON_SOURCE_ROOTS=str(tmp_path),
    )
    directory, table = world.write_checkpoint(tmp_path / "run", 900)
    expected = digests_of(directory)
    fault = proxy.fail(How.DELAY, "PUT", f"/{s3_bucket}/evidence/", skip=1)
    house.manage("shell", "-v0", "-c", OPEN.format(uri=directory.as_uri(), table=table))
    assert fault.met.wait(PATIENCE_S), house.sql("SELECT kind, state, error FROM runs_work")

    before = house.up.pid_of("postgres")
    kill(before)
    eventually("it is back", lambda: answers(house) and house.up.pid_of("postgres") != before)
    assert house.sql("SELECT state FROM evidence_item") == [("collecting",)]
    shutil.rmtree(directory)  # it is held
    proxy.heal()
    # What the worker could not write is free again when its lease ends, after 90 s at most.
    house.sql("UPDATE runs_work SET lease_until = now() WHERE state = 'claimed'")
    eventually("it is sealed", lambda: house.sql("SELECT state FROM evidence_item") == [("sealed",)])

    stored = house.sql("SELECT path, key, version_id, sha256 FROM evidence_storedobject")
    assert {path: sha256 for path, _, _, sha256 in stored} == expected
    client = s3_endpoint.client()
    for _, key, version, sha256 in stored:
        body = client.get_object(Bucket=s3_bucket, Key=key, VersionId=version)["Body"].read()
        assert hashlib.sha256(body).hexdigest() == sha256
    listed = client.list_object_versions(Bucket=s3_bucket, Prefix="evidence/")["Versions"]
    assert sorted((row["Key"], row["VersionId"]) for row in listed) == sorted(
        (key, version) for _, key, version, _ in stored
    )
    for what in ("held", "sealed"):
        assert house.one("SELECT count(*) FROM evidence_custodyrow WHERE what = %s", what) == 1
    assert house.manage("shell", "-v0", "-c", CHECK).strip().endswith("[[]]")
    proxy.close()


def answers(house: House) -> bool:
    """Return whether the database takes questions again."""
    try:
        return bool(house.one("SELECT true"))
    except psycopg.OperationalError:
        return False
