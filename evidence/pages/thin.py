"""Files that are sealed and hold next to nothing: a tick alone would make them look like full ones."""

from runs import formatting

# A log of less than this is a greeting: what a rank says before its first step has more.
LOG_BYTES = 1000
_LOGS = frozenset({"rank_logs"})
# What a process or a node hands over; an empty file of a checkpoint or a record of ours may be as it should.
_HANDED_OVER = frozenset({"rank_logs", "flight_recorder", "hardware_records", "raw_samples"})


def words(kind: str, *, files: int, largest: int, empty: int) -> str:
    """Return what is odd about an item's stored files, "" when nothing is.

    Args:
        files: how many there are.
        largest: bytes of the largest.
        empty: how many have no byte at all.
    """
    if not files or kind not in _HANDED_OVER:
        return ""
    if empty == files:
        return (
            "empty: its file has no byte" if files == 1 else f"empty: none of its {files:,} files has a byte"
        )
    if kind in _LOGS and largest < LOG_BYTES:
        most = formatting.size(largest)
        said = f"its file has {most}" if files == 1 else f"none of its {files:,} files has more than {most}"
        return f"nearly empty: {said}; look whether the ranks log elsewhere"
    return f"{empty:,} of its {files:,} files are empty" if empty else ""
