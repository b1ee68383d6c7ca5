"""State codes as palette PNG tiles, written by hand: a header, a palette and one compressed plane.

The plane holds state codes, not colours, so that light and dark differ by 54 bytes of palette only.
Format: PNG specification, colour type 3 (https://www.w3.org/TR/png-3/).
"""

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.uint8]

OUTSIDE, HEALTHY, HELD, MISSING, SPREAD, STRAGGLER, SPIKE, NO_PROGRESS, CHECKSUM, NONFINITE = range(10)
# Not states: what the patterns and glyphs are drawn with, and the five steps of the layer ramp.
HATCH, GLYPH, TEXT, RAMP1, RAMP2, RAMP3, RAMP4, RAMP5 = range(10, 18)

_LIGHT = (
    "FFFFFF E6EBF0 FFFFFF FFFFFF DDA6A3 00695F DE5B00 0B77E3 5A14B8 A50021 "
    "76828E FFFFFF 151A20 B7D2EC 84B1DD 558DC2 366494 1B3855"
)
_DARK = (
    "12171D 232C35 12171D 12171D 8A3338 1FDDB9 FFB25A 3B7DE8 D5A8FF FF4F6B "
    "687482 12171D E4E9EE 254A6E 386B9C 5C90C0 90B8DE D3E5F7"
)
PALETTES = {"light": bytes.fromhex(_LIGHT), "dark": bytes.fromhex(_DARK)}

GLYPH_PX = 10  # cells at least this large get a gap and a glyph: the state must not be colour alone
SLOTS_PX = 24  # cells at least so wide are split into the five phases of a step
HATCH_PX = 8  # distance of the diagonals of held
LANE_HATCH_PX = 3  # ... in a lane so low that diagonals would look like marks

# Glyphs as 7 × 7 bitmaps, one string per row.
_BITMAPS = {
    NONFINITE: ("#.....#", ".#...#.", "..#.#..", "...#...", "..#.#..", ".#...#.", "#.....#"),
    SPREAD: (".......", ".#...#.", "..#.#..", "...#...", "..#.#..", ".#...#.", "......."),
    CHECKSUM: ("......#", ".....#.", "#######", "...#...", "#######", ".#.....", "#......"),
    NO_PROGRESS: (".......", ".......", ".......", "#######", ".......", ".......", "......."),
    SPIKE: ("...#...", "...#...", "..###..", "..###..", ".#####.", ".#####.", "#######"),
    STRAGGLER: (".......", "....#..", ".....#.", "#######", ".....#.", "....#..", "......."),
}
_GLYPHS = {
    state: np.argwhere(np.array([[pixel == "#" for pixel in row] for row in rows]))
    for state, rows in _BITMAPS.items()
}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode(plane: Plane, theme: str) -> bytes:
    """Return `plane` uint8[height, width] of palette indexes as a PNG file.

    Raises:
        ValueError: the plane is empty, not two-dimensional, or the theme is not light or dark.
    """
    if plane.ndim != 2 or not plane.size:
        raise ValueError(f"a tile needs rows and columns, got shape {plane.shape}")
    if theme not in PALETTES:
        raise ValueError(f"theme: expected light or dark, got {theme!r}")
    height, width = plane.shape
    # Filter byte 0 (none) before each row: state codes repeat exactly, so deflate alone does best.
    rows = np.zeros((height, width + 1), dtype=np.uint8)
    rows[:, 1:] = plane
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", PALETTES[theme]),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)),
            _chunk(b"IEND", b""),
        )
    )


def evenly(cells: int, pixels: int) -> NDArray[np.int64]:
    """Return the cell of each pixel where all cells are equally large.

    Raises:
        ValueError: there are more cells than pixels, so that a bad one could be lost.
    """
    if cells > pixels:
        raise ValueError(f"{cells} cells do not fit {pixels} pixels")
    return np.arange(pixels) * cells // pixels


def paint(
    states: Plane,
    x_cell: NDArray[np.int64],
    y_cell: NDArray[np.int64],
    *,
    borders: Sequence[int] = (),
    phases: Sequence[tuple[int, int, int]] = (),
) -> Plane:
    """Return palette indexes uint8[height, width] for `states` uint8[rows, columns] of cells.

    Cells are only ever enlarged here: whoever made `states` already let the worst state win where
    a pixel covers several cells.

    Args:
        x_cell, y_cell: the column and the row of each pixel, ascending.
        borders: first rows of groups (indexes into `states`), drawn as a 1 px surface line.
        phases: row, column and phase (0 data … 4 optimizer) of cells; where cells are at least 24 px wide
            they are split into five slots of which the phase's is filled.
    """
    rows, columns = states.shape
    width, height = len(x_cell), len(y_cell)
    plane = states[np.ix_(y_cell, x_cell)].astype(np.uint8)
    x_edges = np.searchsorted(x_cell, np.arange(columns + 1))
    y_edges = np.searchsorted(y_cell, np.arange(rows + 1))

    xs, ys = np.arange(width)[None, :], np.arange(height)[:, None]
    plane[(plane == HELD) & ((xs + ys) % (HATCH_PX if height >= HATCH_PX else LANE_HATCH_PX) == 0)] = HATCH
    _dots(plane, states, x_edges, y_edges)
    if width >= GLYPH_PX * columns and height >= GLYPH_PX * rows:
        _cells(plane, states, x_edges, y_edges)
        if width >= SLOTS_PX * columns:
            _slots(plane, states, x_edges, y_edges, phases)
    for row in borders:
        if 0 < row < rows:
            plane[y_edges[row]] = OUTSIDE
    return plane


def _dots(plane: Plane, states: Plane, x_edges: NDArray[np.int64], y_edges: NDArray[np.int64]) -> None:
    """Draw the pattern of missing: one dot per cell, thinned to one per 4 px where cells are smaller."""
    if not (states == MISSING).any():
        return
    x_dots = np.unique((x_edges[:-1] + x_edges[1:]) // 2 // 4 * 4 + 1)
    y_dots = np.unique((y_edges[:-1] + y_edges[1:]) // 2 // 4 * 4 + 1)
    grid = np.zeros(plane.shape, dtype=bool)
    grid[np.ix_(y_dots[y_dots < plane.shape[0]], x_dots[x_dots < plane.shape[1]])] = True
    plane[grid & (plane == MISSING)] = HATCH


def _cells(plane: Plane, states: Plane, x_edges: NDArray[np.int64], y_edges: NDArray[np.int64]) -> None:
    """Draw the gaps between cells and the glyph of every cell that is not healthy."""
    patterned = (plane == HATCH) | (plane == HELD) | (plane == MISSING)
    gaps = np.zeros(plane.shape, dtype=bool)
    gaps[:, x_edges[1:-1] - 1] = True
    gaps[y_edges[1:-1] - 1] = True
    plane[gaps & ~patterned] = OUTSIDE
    for state, bitmap in _GLYPHS.items():
        cells = np.argwhere(states == state)
        if not len(cells):
            continue
        top = (y_edges[cells[:, 0]] + y_edges[cells[:, 0] + 1] - 1) // 2 - 3
        left = (x_edges[cells[:, 1]] + x_edges[cells[:, 1] + 1] - 1) // 2 - 3
        ink = TEXT if state == SPREAD else GLYPH
        plane[top[:, None] + bitmap[:, 0], left[:, None] + bitmap[:, 1]] = ink


def _slots(
    plane: Plane,
    states: Plane,
    x_edges: NDArray[np.int64],
    y_edges: NDArray[np.int64],
    phases: Sequence[tuple[int, int, int]],
) -> None:
    """Fill only the slot of the phase in which a cell went bad; its glyph stands there, if it fits."""
    for row, column, phase in phases:
        # The gap belongs to the cell on its left and above; there is none at the tile's edge.
        left, right = int(x_edges[column]), int(x_edges[column + 1]) - (column + 1 < states.shape[1])
        top, bottom = int(y_edges[row]), int(y_edges[row + 1]) - (row + 1 < states.shape[0])
        state = int(states[row, column])
        slot = [left + (right - left) * n // 5 for n in (phase, phase + 1)]
        plane[top:bottom, left:right] = HEALTHY
        plane[top:bottom, slot[0] : slot[1]] = state
        glyph = _GLYPHS.get(state)
        if glyph is not None and slot[1] - slot[0] >= 9:
            at = (top + bottom) // 2 - 3, (slot[0] + slot[1]) // 2 - 3
            plane[glyph[:, 0] + at[0], glyph[:, 1] + at[1]] = TEXT if state == SPREAD else GLYPH
