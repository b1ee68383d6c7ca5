"""The store and the peer of the vault's benchmark: a radosgw of its own, and rclone."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from benchmarks.bench_mlflow import Unavailable, install
from tests.ceph import PROGRAMS, Ceph


@dataclass(frozen=True)
class Store:
    """A running gateway, and a directory beside it for files."""

    ceph: Ceph
    files: Path
    rclone: str

    def client(self, threads: int = 10) -> Any:
        """Return a plain boto3 client, as anybody would write it."""
        return boto3.client(
            "s3",
            endpoint_url=self.ceph.url,
            aws_access_key_id=self.ceph.access_key,
            aws_secret_access_key=self.ceph.secret_key,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=threads),
        )

    def vault_url(self, bucket: str) -> str:
        """Return `ANDON_VAULT_URL` of a bucket."""
        host = urlsplit(self.ceph.url).netloc
        return f"s3+http://{self.ceph.access_key}:{self.ceph.secret_key}@{host}/{bucket}"

    def run_rclone(self, *arguments: str) -> None:
        """Run rclone with a remote `store:`; everything else is as it comes."""
        remote = {
            "RCLONE_CONFIG_STORE_TYPE": "s3",
            "RCLONE_CONFIG_STORE_PROVIDER": "Ceph",
            "RCLONE_CONFIG_STORE_ENDPOINT": self.ceph.url,
            "RCLONE_CONFIG_STORE_ACCESS_KEY_ID": self.ceph.access_key,
            "RCLONE_CONFIG_STORE_SECRET_ACCESS_KEY": self.ceph.secret_key,
            "RCLONE_CONFIG": str(self.files / "no-rclone.conf"),
        }
        subprocess.run(
            [self.rclone, *arguments], env=os.environ | remote, check=True, stderr=subprocess.PIPE, text=True
        )

    def empty(self, bucket: str) -> None:
        """Delete everything in a bucket and have the store free the space before the next measurement."""
        client = self.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            keys = [{"Key": row["Key"]} for row in page.get("Contents", [])]
            if keys:
                client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
        self.ceph.collect_garbage()


@contextlib.contextmanager
def store() -> Iterator[Store]:
    """Start the gateway in a directory that is removed afterwards.

    Raises:
        Unavailable: a program is missing, or rclone cannot be installed.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise Unavailable(f"needs {', '.join(missing)} (apt-packages.txt)")
    rclone = shutil.which("rclone") or str(install().with_name("rclone"))
    with tempfile.TemporaryDirectory(prefix="andon-bench-vault-") as name:
        ceph = Ceph(Path(name) / "ceph")
        files = Path(name) / "files"
        files.mkdir()
        try:
            ceph.start()
            yield Store(ceph, files, rclone)
        finally:
            ceph.stop()
