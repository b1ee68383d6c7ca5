"""Tiles are real PNG files in which no bad cell is lost."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs import grid, grid_png, grid_tiles


def painted_on(states, width, height):
    rows, columns = states.shape
    return grid_png.paint(states, grid_png.evenly(columns, width), grid_png.evenly(rows, height))


def decode(body):
    """Read a palette PNG back as (plane, palette), by the PNG specification and not by the encoder."""
    assert body[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(body):
        size, kind = struct.unpack(">I4s", body[at : at + 8])
        data = body[at + 8 : at + 8 + size]
        assert struct.unpack(">I", body[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        parts[kind] = data
        at += 12 + size
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert (depth, colour, rest) == (8, 3, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:], np.frombuffer(parts[b"PLTE"], np.uint8).reshape(-1, 3)


def test_a_tile_decodes_to_what_was_encoded():
    plane = np.random.default_rng(1).integers(0, 18, (37, 91)).astype(np.uint8)
    found, palette = decode(grid_png.encode(plane, "light"))
    assert (found == plane).all()
    assert palette[grid_png.NONFINITE].tolist() == [0xA5, 0x00, 0x21]


def test_the_themes_differ_in_the_palette_only():
    plane = np.full((4, 4), grid_png.SPREAD, np.uint8)
    light, light_palette = decode(grid_png.encode(plane, "light"))
    dark, dark_palette = decode(grid_png.encode(plane, "dark"))
    assert (light == dark).all()
    assert light_palette.tolist() != dark_palette.tolist()


@pytest.mark.parametrize("plane", [np.zeros((0, 4), np.uint8), np.zeros(4, np.uint8)])
def test_an_empty_tile_is_refused(plane):
    with pytest.raises(ValueError, match="rows and columns"):
        grid_png.encode(plane, "light")


def test_an_unknown_theme_is_refused():
    with pytest.raises(ValueError, match="light or dark"):
        grid_png.encode(np.zeros((1, 1), np.uint8), "sepia")


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(40, 400),
    st.integers(40, 400),
    st.integers(),
    st.data(),
)
def test_every_cell_has_its_state_somewhere_in_its_pixels(rows, columns, width, height, seed, data):
    states = np.ones((rows, columns), np.uint8)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    states[row, column] = grid_png.NONFINITE
    painted = painted_on(states, width, height)
    ys, xs = np.nonzero(painted == grid_png.NONFINITE)
    assert len(ys)
    assert set(ys * rows // height) == {row}
    assert set(xs * columns // width) == {column}


def test_large_cells_carry_a_glyph_so_that_the_state_is_not_colour_alone():
    states = np.array([[grid_png.NONFINITE, grid_png.SPREAD]], np.uint8)
    painted = painted_on(states, 40, 20)
    assert grid_png.GLYPH in painted[:, :20]
    assert grid_png.TEXT in painted[:, 20:]


def test_wide_cells_are_split_into_phases_of_which_the_bad_one_is_filled():
    states = np.array([[1, grid_png.NONFINITE]], np.uint8)
    cells = [grid_png.evenly(2, 100), grid_png.evenly(1, 20)]
    painted = grid_png.paint(states, *cells, phases=[(0, 1, 2)])
    filled = np.flatnonzero((painted[:, 50:] != 1).all(axis=0) & (painted[:, 50:] != 0).any(axis=0))
    assert (filled.min(), filled.max()) == (20, 29)  # the third of five slots of 50 px
    narrow = grid_png.paint(states, grid_png.evenly(2, 40), cells[1], phases=[(0, 1, 2)])
    assert (narrow[:19, 20:39] != 1).all()


def test_held_is_hatched_and_missing_dotted():
    painted = painted_on(np.array([[grid_png.HELD, grid_png.MISSING]], np.uint8), 64, 32)
    assert 0 < (painted[:, :32] == grid_png.HATCH).mean() < 0.2
    assert 0 < (painted[:, 32:] == grid_png.HATCH).mean() < 0.2


def test_more_cells_than_pixels_are_refused_because_a_bad_one_could_be_lost():
    with pytest.raises(ValueError, match="do not fit"):
        painted_on(np.ones((10, 10), np.uint8), 5, 10)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_exact_runs_cover_every_bad_cell_exactly_once(seed):
    plane = np.random.default_rng(seed).choice([0, 1, 1, 1, 2, 4, 9], (12, 17)).astype(np.uint8)
    window = grid.Window(100, 116, 8, 19)
    covered = np.zeros(plane.shape, np.uint8)
    for step, step_last, rank, rank_last, state in grid_tiles.exact_runs(plane, window):
        part = covered[rank - 8 : rank_last - 7, step - 100 : step_last - 99]
        assert not part.any()
        part[:] = state
    assert (covered == np.where(plane > 1, plane, 0)).all()


def test_a_block_of_equal_cells_is_one_run():
    plane = np.full((16_384, 3), grid_png.SPREAD, np.uint8)
    assert grid_tiles.exact_runs(plane, grid.Window(1, 3, 0, 16_383)) == [[1, 3, 0, 16_383, grid_png.SPREAD]]


def test_too_many_runs_say_so_instead_of_sending_half():
    plane = np.where(np.indices((200, 200)).sum(axis=0) % 2, grid_png.SPREAD, 1).astype(np.uint8)
    assert grid_tiles.exact_runs(plane, grid.Window(0, 199, 0, 199)) is None


@pytest.mark.parametrize("text", ["", "x", "5", "9-5", "-1-5", "1-99999999999999999999", "0-64"])
def test_a_bad_range_keeps_the_opening_window(text):
    extent = grid.Extent(0, 700, 64, None, "v")
    opening = grid.opening_window(extent, 699)
    assert grid.read_window("", text, opening, extent) == opening


def test_the_window_opens_around_the_first_bad_step():
    extent = grid.Extent(0, 18_004, 64, 18_004, "v")
    assert grid.opening_window(extent, 18_003) == grid.Window(17_875, 18_014, 0, 63)
    # Held by hand, nothing is bad: where it stopped belongs to the picture all the same.
    assert grid.opening_window(extent, None) == grid.Window(17_865, 18_014, 0, 63)
    going_on = replace(extent, held_after=None)
    assert grid.opening_window(going_on, None) == grid.Window(17_865, 18_004, 0, 63)
    assert grid.opening_window(extent, 5).step_first == 0
    # A hold some steps after the first bad one is in the window, one far away is not.
    assert grid.opening_window(replace(extent, held_after=18_023), 18_003).step_last == 18_033
    assert grid.opening_window(replace(extent, held_after=20_000), 18_003).step_last == 18_131
