"""The queue between a training step and its sender: it takes any time the sender does, and no more room."""

import threading

from andon.outbox import Outbox

STEP = {"type": "step", "step": 1}


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


def test_posts_arrive_in_order():
    sender = Stuck()
    sender.free.set()
    outbox = Outbox(sender)
    for number in range(50):
        outbox.frame(number)
    assert outbox.drain(10)
    assert sender.sent == list(range(50))
    outbox.close()


def test_a_sender_that_is_stuck_for_good_keeps_no_step_and_no_action_is_lost():
    sender = Stuck()
    outbox = Outbox(sender, capacity=100)
    outbox.events([STEP])
    assert sender.begun.wait(10)
    for number in range(5000):  # none of these calls would return if one waited
        outbox.events([STEP] if number % 100 else [STEP, {"type": "action"}])
    assert not outbox.drain(0.01)
    sender.free.set()
    assert outbox.drain(10)
    assert sender.sent.count(["step", "action"]) == 50
    assert sender.sent[1] == ["gap"]
    # One being sent, the gap, and as many as there was room for.
    assert len(sender.sent) == 1 + 1 + 100
    outbox.close()


def test_what_was_given_up_is_told_in_number():
    sender = Stuck()
    outbox = Outbox(sender, capacity=10)
    outbox.events([STEP])
    assert sender.begun.wait(10)
    for _ in range(35):
        outbox.events([STEP])
    sender.free.set()
    assert outbox.drain(10)
    assert [event["data"]["posts_lost"] for event in sender.events if event["type"] == "gap"] == [25]
    assert sum(event["type"] == "step" for event in sender.events) == 1 + 10
    outbox.close()


def test_a_post_that_fails_ends_nothing(capsys):
    sender = Stuck()
    sender.free.set()
    outbox = Outbox(sender)
    outbox.frame(ValueError("no frame"))
    outbox.frame("next")
    assert outbox.drain(10)
    assert sender.sent == ["next"]
    assert "a post failed" in capsys.readouterr().err
    outbox.close()
