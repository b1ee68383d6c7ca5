"""`manage.py paging`: what the paging file says, how its channels do; `--test` sends a message over each."""

import sys
from argparse import ArgumentParser

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from incidents.paging import channels, health, on_call
from incidents.paging.ladder import Channel, PagingError, read
from incidents.paging.models import ChannelState, Page
from runs.models import Project


class Command(BaseCommand):
    """Check the paging file and print it without addresses; prove the way to people on request."""

    help = "Check the paging file; --test sends a message over every channel, or over those named."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take whether to send."""
        parser.add_argument("channels", nargs="*", help="only these channels")
        parser.add_argument("--test", action="store_true", help="send a test message now")

    def handle(self, *args: object, **options: object) -> None:
        """Print, and send when asked."""
        if not settings.PAGING_FILE:
            raise CommandError("ANDON_PAGING_FILE is not set: nobody is paged")
        try:
            file = read(str(settings.PAGING_FILE))
        except PagingError as error:
            raise CommandError(str(error)) from error
        named = list(options["channels"] or file.channels)  # type: ignore[call-overload]
        if unknown := [name for name in named if name not in file.channels]:
            raise CommandError(f"there is no channel {unknown[0]!r} in the file")
        for project in Project.objects.order_by("slug"):
            ladder = file.ladder(project.slug)
            holder = on_call.of_project(project)
            self.stdout.write(f"{project.slug}: on call {holder.name if holder else 'nobody'}")
            for step in ladder.steps:
                self.stdout.write(f"  after {step.after_min:g} min: {', '.join(step.channels)}")
        if not options["test"]:
            for line in health.channels():
                self.stdout.write(f"{line.name} ({line.kind}): {line.error or 'no failure known'}")
            return
        proven = [self._test(file.channels[name]) for name in named]
        if not all(proven):
            sys.exit(1)

    def _test(self, channel: Channel) -> bool:
        now = timezone.now()
        message = channels.Message(
            key=f"test-{now:%Y%m%dT%H%M%S}-{channel.name}",
            page_key="test",
            group="test",
            kind=Page.Kind.ANDON,
            what="raised",
            title="Andon: test of the paging path",
            text="Nothing is wrong. This message proves that a page would reach you.",
            link=f"{settings.PUBLIC_URL}/on-call",
            urgent=False,
            at=now,
            raised_at=now,
            # Of a test no tool keeps an open alert.
            ended_at=now,
        )
        state, _ = ChannelState.objects.get_or_create(name=channel.name)
        try:
            channels.send(channel, message)
        except channels.NotSent as error:
            state.error, state.failing_since = str(error)[:300], state.failing_since or now
            state.save()
            self.stdout.write(f"{channel.name}: not sent: {error}")
            return False
        state.error, state.failing_since, state.last_sent_at = "", None, now
        state.save()
        self.stdout.write(f"{channel.name}: sent")
        return True
