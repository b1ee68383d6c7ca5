"""Write an event file of one curve, in the peers' environment."""

import math
import sys


def main(directory: str, steps: int, spike: int) -> None:
    """Write `steps` scalars of the tag `loss`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(directory, max_queue_size=10_000)
    for step in range(steps):
        value = 9.5 if step == spike else 2.0 + math.exp(-step / 2e5)
        summary = Summary(value=[Summary.Value(tag="loss", simple_value=value)])
        writer.add_event(Event(wall_time=1e9 + step, step=step, summary=summary))
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
