"""Eight public failures of different families, told with their own numbers.

Each names its source. The numbers that decided it there are the source's; ordinary steps before them, small
files and node names are ours, so that the run stands alone. `truth` is what a reader of the page should say.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from demo.teller import Teller


@dataclass(frozen=True)
class Case:
    """A public failure: where it is from, how its run is laid out, and how it is told.

    `tell` returns the step after which ranks stop, None where the run goes on.
    """

    run: str
    source: str
    truth: str
    layout: dict[str, Any]
    tell: Callable[[Teller], int | None]
    policy: dict[str, Any] = field(default_factory=dict)
    held_by_hand: str = ""
    silent: tuple[int, ...] = ()  # ranks that answer no directive


def _ordinary(
    first: int, last: int, *, loss: float, norm: float | None, lr: float = 1e-4, every: int = 1, **more: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield healthy steps: noise of a third of a percent on the loss, five on the gradient norm."""
    noise = np.random.default_rng(first)
    for step in range(first, last + 1, every):
        data = {"loss": loss * float(1 + noise.normal(0, 0.003)), "lr": lr, **more}
        if norm is not None:
            data["grad_norm"] = norm * float(np.exp(noise.normal(0, 0.05)))
        yield step, data


def _local_losses(told: Teller, first: int, last: int, loss: float) -> None:
    steps = np.repeat(np.arange(first, last + 1), told.world_size)
    ranks = np.tile(np.arange(told.world_size, dtype=np.int32), last - first + 1)
    noise = np.random.default_rng(last).normal(0, 0.02, len(steps))
    told.frame("rank", steps, ranks, {"loss": (loss + noise).astype(np.float32)})


def _bits(told: Teller, step: int, bits: dict[int, int], *, loss: float, rest: int = 0) -> None:
    """Post one step of every rank with its nonfinite bits."""
    ranks = np.arange(told.world_size, dtype=np.int32)
    values = np.full(told.world_size, rest, np.int32)
    losses = np.full(told.world_size, loss)
    for rank, one in bits.items():
        values[rank] = one
        if one & 2:
            losses[rank] = np.nan
    told.frame(
        "rank", np.full(told.world_size, step), ranks, {"loss": losses, "nonfinite": values}, node=None
    )


# --- one GPU reported a double-bit error


def _two_xids(told: Teller) -> int:
    told.launch(first_step=1, revision="5c0de11")
    told.logs({9: ["step 77 loss nan"]}, ["step 76 loss 3.412 grad_norm 0.81"])
    told.steps(_ordinary(1, 76, loss=3.41, norm=0.8))
    told.checkpoint(50)
    _local_losses(told, 1, 76, 3.41)
    told.batches(range(60, 78), [8, 9, 10])
    node = told.node_of(9)
    for xid, words in ((31, "MMU fault, unmapped page"), (48, "double bit ECC error")):
        told.post(
            [
                {
                    "type": "hardware.xid",
                    "node": node,
                    "step": 76,
                    "data": {"xid": xid, "pci": "000d:00:00", "pid": 3234, "message": words},
                }
            ]
        )
    _bits(told, 77, {9: 2}, loss=3.41, rest=8)
    told.steps([(77, {"loss": float("nan"), "grad_norm": float("nan")})])
    return 77


# --- an overflow in the backward of two ranks that share a tensor


def _two_ranks(told: Teller) -> int:
    pairs = [[rank, rank + 1] for rank in range(0, told.world_size, 2)]
    lanes = [list(range(place, told.world_size, 2)) for place in range(2)]
    told.checkpoint(336_000, attempt=4)
    told.checkpoint(337_000, attempt=4)
    told.launch(first_step=337_001, groups={"tp": pairs, "dp": lanes}, revision="e19f0b7")
    told.logs({}, ["iteration 337070 ok"])
    told.steps(_ordinary(337_001, 337_070, loss=1.84, norm=0.21))
    _local_losses(told, 337_001, 337_070, 1.84)
    told.batches(range(337_060, 337_072), [404, 405])
    _bits(told, 337_071, {404: 4, 405: 4}, loss=1.84, rest=8)
    told.steps([(337_071, {"loss": 1.84, "grad_norm": float("inf")})])
    words = "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/pymp-x7' (in a finalizer)"
    told.post([{"type": "process.error", "rank": 99, "step": 337_071, "data": {"message": words}}])
    return 337_071


# --- the first record is already bad


def _dead_run(told: Teller) -> int:
    told.launch(first_step=1, revision="30d1c4a", precision="bf16")
    told.logs({0: ["iteration 5426 grad norm: nan", "iteration 5427 grad norm: nan"]})
    told.batches(range(5_426, 5_428), [0])
    told.steps(
        (step, {"grad_norm": float("nan"), "lr": 2.999e-4, "loss_scale": 1.0, "tflops": 78.46})
        for step in (5_426, 5_427)
    )
    return 5_427


# --- one step, skipped by the trainer


def _one_infinity(told: Teller) -> None:
    told.launch(first_step=45_301, revision="77aa0c2")
    told.logs({0: ["iteration: 45458, loss: 1.308916", "iteration: 45459, Loss is Infinity"]})
    told.checkpoint(45_400)
    told.steps(_ordinary(45_301, 45_456, loss=1.27, norm=0.6, lr=2e-5))
    told.batches(range(45_440, 45_462), [0])
    told.steps([(45_457, {"loss": 1.2645824, "lr": 2e-5}), (45_458, {"loss": 1.308916, "lr": 2e-5})])
    told.steps([(45_459, {"loss": float("inf"), "lr": 2e-5, "skipped": True, "nonfinite": 66})], rank=0)
    told.steps([(45_460, {"loss": 1.2483193, "lr": 2e-5})])
    told.steps(_ordinary(45_461, 45_466, loss=1.27, norm=0.6, lr=2e-5))


# --- a gradient norm a thousand times its usual, loss unmoved


def _gradient_spike(told: Teller) -> None:
    losses = [1.46, 1.28, 1.60, 1.14, 1.54, 1.61, 1.36, 1.36, 1.51]
    norms = [14.98, 9.78, 7.64, 92.10, 29.00, 5.21, 7.83, 7.79, 11_140.0]
    told.launch(first_step=1, revision="1f4e9d0")
    told.logs({0: ["{'loss': '1.51', 'grad_norm': '11140.00'}"]})
    told.checkpoint(60)
    noise = np.random.default_rng(3)
    told.steps(
        (step, {"loss": 1.4 + noise.normal(0, 0.1), "grad_norm": 8.5 * float(np.exp(noise.normal(0, 0.3)))})
        for step in range(1, 101)
    )
    told.batches(range(90, 110), [0])
    told.steps(
        (101 + place, {"loss": loss, "grad_norm": norm, "lr": 2e-4})
        for place, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    )
    told.steps(_ordinary(110, 114, loss=1.45, norm=8.0, lr=2e-4))


# --- the loss scale collapses while the loss goes to three times itself


def _scale_falls(told: Teller) -> int:
    told.launch(first_step=28_001, precision="fp16", revision="b03377e")
    told.logs({0: [" iteration 29050/ 311541 | lm loss: 7.343709E+00 | loss scale: 8192.0"]})
    told.checkpoint(28_500)
    told.checkpoint(29_000)
    told.steps(
        _ordinary(
            28_010, 29_010, loss=2.775, norm=None, lr=9.85e-5, every=10, loss_scale=32_768.0, grad_norm=0.0
        )
    )
    told.batches(range(29_000, 29_071, 10), [0])
    rows = (
        (29_020, 2.775923, 32_768.0),
        (29_030, 2.772822, 32_768.0),
        (29_040, 2.768131, 65_536.0),
        (29_050, 7.343709, 8_192.0),
        (29_060, 8.715872, 4_096.0),
        (29_070, 7.612, 4_096.0),
    )
    told.steps(
        (step, {"loss": loss, "loss_scale": scale, "grad_norm": 0.0, "lr": 9.849e-5})
        for step, loss, scale in rows
    )
    return 29_070


# --- three ranks wait in an all-reduce that the fourth never entered


def _victims(told: Teller) -> int:
    told.launch(first_step=1, revision="9d2e6b1")
    told.steps(_ordinary(1, 412, loss=2.6, norm=0.5))
    _local_losses(told, 1, 412, 2.6)
    told.checkpoint(400)
    told.batches(range(400, 414), [0, 1, 2, 3])
    ranks = np.arange(3, dtype=np.int32)
    told.frame("rank", np.full(3, 413), ranks, {"loss": np.full(3, 2.6, np.float32)})
    said = {}
    for rank in range(3):
        said[rank] = (
            f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, "
            f"OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) "
            f"ran for 60006{rank} milliseconds before timing out."
        )
    told.logs({rank: [line] for rank, line in said.items()}, ["step 412 loss 2.60"])
    told.post(
        {
            "type": "process.error",
            "rank": rank,
            "node": told.node_of(rank),
            "step": 413,
            "data": {"message": line},
        }
        for rank, line in said.items()
    )
    return 413


# --- the second launch runs other code


def _other_code(told: Teller) -> int:
    packages = {"torch": "2.13.0", "transformer_engine": "2.9.0", "flash_attn": "2.8.3"}
    told.attempt = 1
    told.launch(first_step=900, revision="a41f9c2", environment={"packages": packages})
    told.steps(_ordinary(900, 1_000, loss=2.31, norm=0.42))
    for step in (850, 900, 1_000):
        told.checkpoint(step)
    told.post([{"type": "attempt.exited", "step": 1_000, "data": {"exit_code": 0}}])
    told.attempt = 2
    told.launch(
        first_step=1_001,
        revision="b77d010",
        environment={"packages": packages | {"flash_attn": "3.0.1"}},
        began_from=1_000,
        command=["torchrun", "--nproc-per-node=8", "train.py"],
        diff_stat="3 files, +41 −18: attention.py, loader.py, train.py",
    )
    told.logs({0: ["step 1022 loss 3.87"]})
    told.steps(_ordinary(1_001, 1_070, loss=2.31, norm=0.42))
    _local_losses(told, 1_001, 1_070, 2.31)
    told.batches(range(1_060, 1_075), [0, 1])
    told.steps(
        (step, {"loss": loss, "grad_norm": norm})
        for step, loss, norm in (
            (1_071, 2.86, 1.9),
            (1_072, 3.31, 3.3),
            (1_073, 3.87, 5.1),
            (1_074, 4.4, 7.0),
        )
    )
    return 1_074


def _one_of_many(told: Teller) -> int:
    told.checkpoint(100)
    told.launch(first_step=1, revision="c4b1d90")
    told.steps(_ordinary(1, 258, loss=1.92, norm=0.31))
    _local_losses(told, 230, 258, 1.92)
    told.batches(range(240, 260), [9_216, 9_217])
    _bits(told, 259, {9_217: 4}, loss=1.92, rest=8)
    told.steps([(259, {"loss": 1.92, "grad_norm": float("nan")})])
    return 259


HUGE = Case(
    run="moe-16384",
    source="one rank of 16,384",
    truth="rank 9,217 on node-1152, step 259, backward",
    layout={"world_size": 16_384, "last_step": 259, "step_s": 4.0, "batch": 4_096},
    tell=_one_of_many,
)
_ACT = {"modes": {"spike": "act", "grad_norm": "act"}}
_SPIKE_ACTS = {"modes": {"spike": "act"}}
_GRADIENT_ACTS = {"modes": {"grad_norm": "act"}}
CASES: tuple[Case, ...] = (
    Case(
        run="xid48-16",
        source="Xid 31 and Xid 48 of one GPU (syslog and dmesg of a public tool's tests)",
        truth="rank 9 on node-02, step 77, forward; hardware: Xid 48 on that node",
        layout={"world_size": 16, "first_node": 1, "last_step": 77},
        tell=_two_xids,
    ),
    Case(
        run="inf-two-ranks-512",
        source="NVIDIA resiliency extension: Inf on two ranks of one group, noise of a finalizer after it",
        truth="ranks 404 and 405 (a tie: one tensor group), step 337,071, backward",
        layout={"world_size": 512, "per_node": 4, "attempt": 5, "last_step": 337_071, "step_s": 9.0},
        tell=_two_ranks,
    ),
    Case(
        run="dead-at-full-speed",
        source="bigscience-workshop/Megatron-DeepSpeed issue 396",
        truth="rank not known, at or before step 5,426; no good checkpoint is known",
        layout={"world_size": 8, "last_step": 5_427, "step_s": 4.2, "batch": 8},
        tell=_dead_run,
    ),
    Case(
        run="loss-is-infinity",
        source="intel/ipex-llm issue 1486",
        truth="rank 0 (the only one), step 45,459, forward; skipped, the run goes on",
        layout={"world_size": 1, "last_step": 45_466, "step_s": 2.0, "batch": 32},
        tell=_one_infinity,
    ),
    Case(
        run="grad-norm-11140",
        source="unslothai/unsloth issue 5207",
        truth="step 104 (92.10) first, 109 worst; the rank is not known; the run goes on",
        layout={"world_size": 1, "last_step": 114, "step_s": 3.0, "batch": 16},
        tell=_gradient_spike,
        policy=_GRADIENT_ACTS,
    ),
    Case(
        run="tr1-13b-scale-falls",
        source="bigscience tr1-13B chronicles, “a huge lm loss spike”",
        truth="rank not known, step 29,050; held",
        layout={"world_size": 64, "last_step": 29_070, "step_s": 22.3, "batch": 1024},
        tell=_scale_falls,
        policy=_SPIKE_ACTS,
    ),
    Case(
        run="all-reduce-808",
        source="NCCL watchdog lines of three ranks of four (public threads)",
        truth="rank 3 never entered the all-reduce of step 413 that ranks 0 to 2 wait in; held by hand",
        layout={"world_size": 4, "per_node": 2, "last_step": 413},
        tell=_victims,
        held_by_hand="no rank advances; watchdogs of ranks 0 to 2 report all-reduce 808",
        silent=(3,),
    ),
    Case(
        run="other-code-16",
        source="a restart with another revision; shape of public divergence reports",
        truth="rank not known, step 1,071, 71 steps after a restart with other code; held",
        layout={"world_size": 16, "attempt": 2, "last_step": 1_074},
        tell=_other_code,
        policy=_ACT,
    ),
)
