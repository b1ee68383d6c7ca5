"""The wire: the one definition of events and frames that trainer and server both import.

Events and frames are read from bytes a stranger may have written; whatever is wrong raises
`WireError` (status, problem type, detail, field) and nothing else.
"""

from andon.wire_encoding import decompress
from andon.wire_event_writing import encode_events
from andon.wire_events import (
    BITS,
    EVENT_TYPES,
    ORIGIN_BITS,
    DecodedEvents,
    Event,
    Refusal,
    decode_events,
)
from andon.wire_frame_writing import encode_frame, encode_frame_json
from andon.wire_frames import ARROW_TYPE, MAX_CELLS, MAX_FRAME_BYTES, Frame, decode_frame
from andon.wire_times import format_time, parse_time
from andon.wire_values import WireError, fold_ranks, parse_ranks
from andon.wire_version import HEADER, VERSION

MAX_EVENTS_BYTES_SENT = 4 * 1024 * 1024
MAX_EVENTS_BYTES = 16 * 1024 * 1024

__all__ = [
    "ARROW_TYPE",
    "BITS",
    "EVENT_TYPES",
    "HEADER",
    "MAX_CELLS",
    "MAX_EVENTS_BYTES",
    "MAX_EVENTS_BYTES_SENT",
    "MAX_FRAME_BYTES",
    "ORIGIN_BITS",
    "VERSION",
    "DecodedEvents",
    "Event",
    "Frame",
    "Refusal",
    "WireError",
    "decode_events",
    "decode_frame",
    "decompress",
    "encode_events",
    "encode_frame",
    "encode_frame_json",
    "fold_ranks",
    "format_time",
    "parse_ranks",
    "parse_time",
]
