"""`andon probe` on a real snapshot: an overflow, a bad sample, a sound step, and a second device."""

import json

import pytest

from andon.cli import main

torch = pytest.importorskip("torch", reason="not trained: needs torch")

from torch import nn  # noqa: E402

from andon import halt_snapshot  # noqa: E402
from andon.batch_ring import BatchFacts, BatchRing  # noqa: E402
from andon.checkpoints import Positions  # noqa: E402
from andon.probe import Frozen, Step  # noqa: E402
from andon.restore_check import Parts  # noqa: E402

pytestmark = pytest.mark.torch
BUILD = "tests.andon.monitor.test_probe:build"
STEP = 120  # the failing one
ZEROED, LARGE = (
    480,
    484,
)  # samples whose bytes read back as zeros, and of ordinary size but for half precision


class Net(nn.Module):  # type: ignore[misc]
    """A masked mean: 0/0 where every key is masked; large values overflow in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x, mask):
        hidden = self.first(x) * 400.0
        weight = mask / mask.sum()
        return self.second((hidden * weight[:, None]).sum(0)).square().mean()


def sample(position):
    generator = torch.Generator().manual_seed(position)
    x, mask = torch.randn(4, 8, generator=generator), torch.ones(4)
    if position == ZEROED:
        mask = torch.zeros(4)
    if position == LARGE:
        x = x * 900.0
    return x, mask


def parts():
    model = Net()
    return Parts(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def build(frozen: Frozen) -> Step:
    made = parts()
    model = made.model.to(frozen.device)
    x, mask = (one.to(frozen.device) for one in sample(frozen.batch["positions"][0]))

    def run(_index):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x, mask)

    return Step(made, run)


def snapshot(root, position):
    made = parts()
    loss = made.model(*sample(1))
    loss.backward()
    made.optimizer.step()
    ring = BatchRing()
    for step, at in ((STEP - 1, 3), (STEP, position)):
        ring.append(step, BatchFacts(positions=(at,), lengths=(4,)))
    positions = Positions(
        loader_position=9, consumed_samples=9, optimizer_step=STEP - 1, schedule_position=STEP - 1
    )
    directory, _ = halt_snapshot.write(
        root, made, run="r", attempt=1, step=STEP - 1, positions=positions, ring=ring
    )
    return directory


def told(directory, capsys, *change):
    arguments = ["probe", str(directory), "--step", BUILD, "--json"]
    code = main([*arguments, *(("--change", *change) if change else ())])
    return code, json.loads(capsys.readouterr().out)


def test_an_overflow_is_clean_in_fp32_and_breaks_with_plain_kernels(tmp_path, capsys):
    directory = snapshot(tmp_path, LARGE)
    code, said = told(directory, capsys, "precision=fp32")
    assert (code, said["verdict"]) == (0, "clean")
    assert said["unchanged"]["first"]["module"] in ("first", "second")
    assert said["changed"]["first"] is None
    assert {line["verdict"] for line in said["unchanged"]["restored"]} == {"equal"}
    code, said = told(directory, capsys, "kernels=unfused")
    assert (code, said["verdict"]) == (1, "breaks")
    code, said = told(directory, capsys, f"batch={STEP - 1}")
    assert (code, said["verdict"]) == (0, "clean")


def test_a_bad_sample_breaks_in_fp32_too_and_alone(tmp_path, capsys):
    directory = snapshot(tmp_path, ZEROED)
    assert told(directory, capsys, "precision=fp32")[1]["verdict"] == "breaks"
    code, said = told(directory, capsys)
    assert (code, said["verdict"], said["changed"]) == (1, "breaks", None)
    assert said["step"] == STEP


def test_what_is_clean_as_it_was_proves_nothing(tmp_path, capsys):
    code, said = told(snapshot(tmp_path, 3), capsys, "precision=fp32")
    assert (code, said["verdict"]) == (3, "not reproduced")


def test_two_devices_are_compared_by_digest(tmp_path, capsys):
    code, said = told(snapshot(tmp_path, 3), capsys, "device=cpu")
    assert (code, said["verdict"]) == (0, "same")
    assert said["unchanged"]["digest"] == said["changed"]["digest"]


@pytest.mark.parametrize(
    ("change", "said"),
    [("batch=77", "it keeps 119"), ("precision=fp8", "one of"), ("device=cuda:99", "this machine has")],
)
def test_a_change_that_cannot_be_made_is_2(tmp_path, capsys, change, said):
    directory = snapshot(tmp_path, 3)
    step = BUILD
    assert main(["probe", str(directory), "--step", step, "--change", change]) == 2
    assert said in capsys.readouterr().err


def test_lines_are_for_a_person(tmp_path, capsys):
    directory = snapshot(tmp_path, ZEROED)
    main(["probe", str(directory), "--step", BUILD, "--change", "precision=fp32"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 120 of r, rank 0, from W(119) of attempt 1"
    assert "first nonfinite" in lines[-3]
    assert lines[-1] == "it breaks as before"
