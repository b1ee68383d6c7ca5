"""A training job without the training: posts a step and now and then a verdict, and says how far it got.

    python -m tests.andon.trainer_child URL SECRET SPOOL FIRST LAST [CLOCK_OFF_S] [FILE_LIMIT_BYTES]

A line is printed when `send_events` has returned. Reads one line at the end, then flushes and prints its
status.
"""

import json
import resource
import sys
import time

from andon.client import Client
from andon.client_http import Backoff

url, secret, spool, first, last = sys.argv[1:6]
off_s, limit = (
    (float(sys.argv[6]) if len(sys.argv) > 6 else 0.0),
    int(sys.argv[7]) if len(sys.argv) > 7 else 0,
)
if off_s:
    right = time.time
    time.time = lambda: right() + off_s
    time.time_ns = lambda: int((right() + off_s) * 1e9)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
Backoff.__init__.__defaults__ = (0.02, 0.1)
client = Client(url, "my-run", secret, spool_dir=spool, max_wait_s=5.0)
for step in range(int(first), int(last)):
    events = [{"type": "step", "step": step, "data": {"note": "x" * 200}}]
    if step % 25 == 0:
        events.append({"type": "verdict", "step": step, "data": {"kind": "loss_spike"}})
    client.send_events(events)
    print(step, flush=True)
print(json.dumps(client.status()), flush=True)
sys.stdin.readline()
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
client.flush(20)
client.close()
print(json.dumps(client.status()), flush=True)
