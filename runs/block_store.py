"""Blocks of one attempt in the database: read when first asked for, written with all that lie above them."""

from runs.blocks import FACTOR, TOP, Block
from runs.rows import raw_cursor

Place = tuple[int, int, int]  # level, number, band

_READ = """
SELECT cells, columns FROM runs_gridblock
WHERE run_id = %s AND attempt = %s AND level = %s AND number = %s AND band = %s
"""
_WRITE = """
INSERT INTO runs_gridblock (run_id, attempt, level, number, band, cells, by_8, by_64, columns)
VALUES (%s, %s, %s, %s, %s, %b, %b, %b, %b)
ON CONFLICT (run_id, attempt, level, number, band) DO UPDATE SET cells = EXCLUDED.cells,
    by_8 = EXCLUDED.by_8, by_64 = EXCLUDED.by_64, columns = EXCLUDED.columns
"""
_BETWEEN = """
SELECT number, band FROM runs_gridblock
WHERE run_id = %s AND attempt = %s AND level = 0 AND number BETWEEN %s AND %s ORDER BY number, band
"""


class BlockStore:
    """The blocks of one attempt, inside a transaction."""

    def __init__(self, run_id: int, attempt: int) -> None:
        """Begin with nothing read."""
        self.of = (run_id, attempt)
        self._live: dict[Place, Block] = {}
        self._changed: set[Place] = set()

    def get(self, level: int, number: int, band: int) -> Block:
        """Return a block to read or to change; an empty one where nothing is stored."""
        place = (level, number, band)
        block = self._live.get(place)
        if block is None:
            with raw_cursor() as cursor:
                cursor.execute(_READ, (*self.of, *place))
                row = cursor.fetchone()
            block = self._live[place] = Block.empty(0) if row is None else Block.read(*row)
        return block

    def changed(self, number: int, band: int) -> None:
        """Say that a block of level 0 was changed."""
        self._changed.add((0, number, band))

    def between(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return number and band of the stored blocks of level 0 from `first` to `last`."""
        with raw_cursor() as cursor:
            cursor.execute(_BETWEEN, (*self.of, first, last))
            return [(int(number), int(band)) for number, band in cursor.fetchall()]

    def flush(self) -> None:
        """Write what was changed and every coarser block above it, and forget all that was read."""
        wanted = self._changed
        for level in range(TOP + 1):
            above: set[Place] = set()
            for place in sorted(wanted):
                _, number, band = place
                self._write(place)
                if level < TOP:
                    parent = (level + 1, number // FACTOR, band)
                    self.get(*parent).quarter(self._live[place], number % FACTOR)
                    above.add(parent)
            # What lies above holds all of it now.
            for place in wanted:
                del self._live[place]
            wanted = above
        self._changed.clear()
        self._live.clear()

    def _write(self, place: Place) -> None:
        with raw_cursor() as cursor:
            cursor.execute(_WRITE, (*self.of, *place, *self._live[place].stored()))
