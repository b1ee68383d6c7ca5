"""The queue between a training step and its sender: it takes any time the sender does, and no more room."""

import threading
import time

from andon.outbox import Outbox

STEP = {"type": "step", "step": 1}
NEVER_S = 3600.0


class Stuck:
    """A sender that answers nothing until it is let."""

    directive = None

    def __init__(self):
        self.free, self.begun = threading.Event(), threading.Event()
        self.sent: list = []
        self.events: list = []

    def send_events(self, events, /):
        self.begun.set()
        self.free.wait()
        self.sent.append([event["type"] for event in events])
        self.events += events

    def send_frame(self, frame, /):
        self.begun.set()
        self.free.wait()
        if isinstance(frame, Exception):
            raise frame
        self.sent.append(frame)


class Free(Stuck):
    """A sender that is never stuck."""

    def __init__(self):
        super().__init__()
        self.free.set()


def until(what):
    end = time.monotonic() + 10
    while not what() and time.monotonic() < end:
        time.sleep(0.005)
    return what()


def test_posts_leave_in_order():
    sender = Free()
    outbox = Outbox(sender)
    for number in range(50):
        outbox.events([{"type": "step", "step": number}])
        outbox.frame(number)
    assert outbox.drain(10)
    assert [one for one in sender.sent if isinstance(one, int)] == list(range(50))
    assert [event["step"] for event in sender.events] == list(range(50))
    assert sender.sent.index(49) > sender.sent.index(["step"])
    outbox.close()


def test_healthy_steps_wait_for_company_and_leave_as_one_post():
    sender = Free()
    outbox = Outbox(sender, collect_s=NEVER_S)
    for number in range(500):
        outbox.events([{"type": "step", "step": number}])
    assert not sender.begun.wait(0.05)
    assert outbox.drain(10)
    assert sender.sent == [["step"] * 500]
    assert [event["step"] for event in sender.events] == list(range(500))
    outbox.close()


def test_they_do_not_wait_longer_than_was_said():
    sender = Free()
    outbox = Outbox(sender, collect_s=0.05)
    outbox.events([STEP])
    assert until(lambda: sender.sent == [["step"]])
    outbox.close()


def test_what_is_urgent_leaves_at_once_with_all_before_it():
    sender = Free()
    outbox = Outbox(sender, collect_s=NEVER_S)
    for number, urgent in enumerate([False, True, False]):
        outbox.events([STEP])
        outbox.events([STEP], urgent=urgent)
        if number == 1:
            assert until(lambda: len(sender.events) == 4)
    outbox.events([{"type": "action"}])
    assert until(lambda: len(sender.events) == 7)
    outbox.frame("a frame")
    assert until(lambda: sender.sent[-1] == "a frame")
    outbox.close()


def test_a_sender_that_is_stuck_for_good_keeps_no_step_and_no_action_is_lost():
    sender = Stuck()
    outbox = Outbox(sender, capacity=100)
    outbox.events([STEP], urgent=True)
    assert sender.begun.wait(10)
    for number in range(5000):  # none of these calls would return if one waited
        outbox.events([STEP] if number % 100 else [STEP, {"type": "action"}])
    assert not outbox.drain(0.01)
    sender.free.set()
    assert outbox.drain(10)
    assert sender.sent[1] == ["gap"]
    types = [event["type"] for event in sender.events]
    assert types.count("action") == 50
    # One being sent, and as many as there was room for, each with its step.
    assert types.count("step") == 1 + 100
    assert sender.events[1]["data"]["posts_lost"] == 5000 - 100
    outbox.close()


def test_what_was_given_up_is_told_in_number():
    sender = Stuck()
    outbox = Outbox(sender, capacity=10)
    outbox.events([STEP], urgent=True)
    assert sender.begun.wait(10)
    for _ in range(35):
        outbox.events([STEP])
    sender.free.set()
    assert outbox.drain(10)
    assert [event["data"]["posts_lost"] for event in sender.events if event["type"] == "gap"] == [25]
    assert sum(event["type"] == "step" for event in sender.events) == 1 + 10
    outbox.close()


def test_a_post_that_fails_ends_nothing(capsys):
    sender = Free()
    outbox = Outbox(sender)
    outbox.frame(ValueError("no frame"))
    outbox.frame("next")
    assert outbox.drain(10)
    assert sender.sent == ["next"]
    assert "a post failed" in capsys.readouterr().err
    outbox.close()
