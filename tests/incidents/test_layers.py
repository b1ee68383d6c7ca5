"""Layers of an incident: the heat map's numbers, lines with their own band, and replicas that differ."""

import numpy as np
import pytest
from django.http import QueryDict

from andon import wire
from andon.policy import Policy
from incidents.figures import incident_figure
from incidents.layer_figure import layer_plane
from incidents.layer_view import LayerView, layer_view
from incidents.models import Incident
from runs import grid, grid_png
from runs.layers import layer_cells
from tests.runs.conftest import _nothing_remembered, new_trainer  # noqa: F401

pytestmark = pytest.mark.django_db

STEPS, LAYERS, REPLICAS, BAD = 160, 6, 3, 159
NAMES = [f"layers.{n}.attn" for n in range(LAYERS)]


@pytest.fixture
def incident(project) -> Incident:
    """A run of three replicas; rank 1's layer 4 rises for eight steps and is nonfinite at step 159."""
    trainer = new_trainer()
    trainer.events(
        {
            "type": "attempt.launched",
            "attempt": 1,
            "data": {"world_size": REPLICAS, "nodes": [{"node": "n0", "ranks": "0-2"}]},
        }
    )
    noise = np.random.default_rng(5)
    shape = (STEPS, REPLICAS, LAYERS)
    norm = np.exp(noise.normal(-1, 0.05, (STEPS, 1, LAYERS))).repeat(REPLICAS, axis=1)
    norm[-9:-1, 1, 4] *= np.linspace(1.2, 3.0, 8)
    norm[-1, 1, 4] = np.nan
    ratio = np.full(shape, 1e-3)
    ratio[:, :, 2] = 0.0
    step = np.arange(STEPS)[:, None, None] + np.zeros(shape, int)
    rank = np.arange(REPLICAS)[None, :, None] + np.zeros(shape, int)
    lane = np.arange(LAYERS)[None, None, :] + np.zeros(shape, int)
    answer = trainer.frame(
        wire.Frame(
            stream="layer",
            attempt=1,
            step=step.ravel().astype(np.int64),
            lane=[NAMES[one] for one in lane.ravel().tolist()],
            rank=rank.ravel().astype(np.int32),
            metrics={
                "grad_norm": norm.ravel().astype(np.float32),
                "update_ratio": ratio.ravel().astype(np.float32),
            },
            views={"grad_norm": "local"},
        )
    )
    assert answer.status_code == 202
    return Incident.objects.get(run=trainer.run)


def drawn(incident: Incident, view: LayerView) -> dict:
    extent = grid.extent(incident.run, 1)
    window = grid.opening_window(extent, BAD)
    rows = grid.rows(incident.run, 1, extent, "", "")
    looked = grid.View(incident.run, 1, window, rows, extent, False)
    return incident_figure(incident, looked, policy=Policy(), width=856, theme="light", layers=view)


def test_the_address_is_read_and_anything_else_is_the_default():
    asked = layer_view(QueryDict("layers=ratio&replica=2&line=a&line=b&line=a"))
    assert asked == LayerView("ratio", 2, ("a", "b"))
    assert asked.query() == {"layers": "ratio", "replica": "2"}
    for wrong in ("", "layers=x&replica=-1&line=", "replica=99999999999"):
        assert layer_view(QueryDict(wrong)) == LayerView()
    assert len(layer_view(QueryDict("&".join(f"line={n}" for n in range(9)))).lines) == 4


def test_every_replica_is_kept_and_the_worst_of_them_shown(incident):
    cells = layer_cells(incident.run, 1, "grad_norm", 150, BAD)
    assert cells.replicas == [0, 1, 2]
    names, steps, worst = cells.table()
    assert steps.tolist() == list(range(150, BAD + 1))
    four = names.index(NAMES[4])
    assert np.isnan(worst[four, -1])
    _, _, calm = cells.of(rank=0).table()
    assert calm[four, -1] < 0.5
    assert worst[four, -2] / calm[four, -2] == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("shown", ["z", "norm", "ratio"])
def test_the_heat_map_shows_the_number_asked_for(incident, shown):
    window = grid.Window(100, BAD, 0, REPLICAS - 1)
    plane = layer_plane(incident, window, Policy(), LayerView(shown))
    assert plane.names == NAMES
    assert plane.codes.shape == (LAYERS, 60)
    if shown == "ratio":
        assert plane.says == "1\u00a0layer at 0: not updated"
        assert (plane.codes[:, -1] == grid_png.HEALTHY).all()
        return
    assert plane.codes[4, -1] == grid_png.NONFINITE
    # Rank 1's layer rose for eight steps: dark in z and in the norm, and in no other layer.
    assert plane.codes[4, -2] >= grid_png.RAMP3
    assert plane.codes[:4, -2].max() < grid_png.RAMP3
    assert plane.codes[4, -12] < grid_png.RAMP3
    calm = layer_plane(incident, window, Policy(), LayerView(shown, replica=0))
    assert calm.codes[4, -2] < grid_png.RAMP3


def test_what_was_not_measured_keeps_its_row_and_says_so(incident):
    window = grid.Window(0, 20, 0, REPLICAS - 1)
    plane = layer_plane(incident, window, Policy(), LayerView("z", replica=77))
    assert (plane.codes == grid_png.OUTSIDE).all()
    assert plane.cells.replicas == [0, 1, 2]


def test_a_line_stands_in_its_band_and_the_other_replicas_thin_beside_it(incident):
    figure = drawn(incident, LayerView(lines=(NAMES[4], "no such layer")))
    meta = figure["layout"]["meta"]["layers"]
    assert [line["layer"] for line in meta["lines"]] == [NAMES[4]]
    assert meta["lines"][0]["says"].startswith("rank 1; 2\u00a0other replicas thin; band is median ± 6 σ")
    row = figure["layout"]["meta"]["rows"]["line0"]
    assert figure["layout"]["meta"]["rows"]["layers"][0] < row[0]
    thin = [trace["name"] for trace in figure["data"] if trace.get("name") in ("rank 0", "rank 2")]
    assert thin == ["rank 0", "rank 2"]
    curve = next(trace for trace in figure["data"] if trace.get("name") == NAMES[4])
    assert curve["x"][-1] == BAD
    assert curve["y"][-1] is None
    assert any(
        trace.get("fill") == "tonexty" and trace["yaxis"] == curve["yaxis"] for trace in figure["data"]
    )


def test_replicas_that_agree_are_one_line_and_said_to(incident):
    figure = drawn(incident, LayerView(lines=(NAMES[0],)))
    (line,) = figure["layout"]["meta"]["layers"]["lines"]
    assert "all 3 replicas agree" in line["says"]


def test_the_first_nonfinite_layer_is_ringed(incident):
    figure = drawn(incident, LayerView())
    texts = [note.get("text") for note in figure["layout"]["annotations"]]
    assert f"{NAMES[4]} first" in texts
