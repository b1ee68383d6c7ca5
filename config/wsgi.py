"""WSGI entry point."""

import gc
import multiprocessing
import os
import signal

from django.core.wsgi import get_wsgi_application

from config.embedded.launch import die_with_parent

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

# A worker of a server that `manage.py up` started: when the server is killed with -9, go with it.
_server = multiprocessing.parent_process()
if _server is not None and _server.pid is not None and os.environ.get("DIE_WITH_PARENT") == "1":
    die_with_parent(_server.pid, signal.SIGKILL)

application = get_wsgi_application()

# Their models need the apps that the line above loaded.
from config import health  # noqa: E402
from incidents.paging import deadman  # noqa: E402

# The page that needs no worker is watched for from here (docs/paging.md).
deadman.watch(health.why_not_database)

# What start-up made lives as long as the process: a collection that walks all of it again would make one
# post in a few thousand wait for tens of milliseconds.
gc.collect()
gc.freeze()
# Opening an incident makes tens of thousands of short-lived objects: at Python's own thresholds that is
# dozens of collections while a fleet waits for its directive.
gc.set_threshold(20_000, 20, 20)
