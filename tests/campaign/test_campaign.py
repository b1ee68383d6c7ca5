"""Thirty cases of the campaign, in one launch of four ranks; `make campaign` plays all."""

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("campaign"), pytest.mark.timeout(240)]

NAMES = """
ddp: nan in data on rank 1
ddp: inf in forward on rank 2
ddp: nan in loss on rank 0
ddp: inf in backward on rank 3
ddp: a reduced gradient on rank 2
ddp: a weight on rank 1
ddp: a loss spike on rank 2
ddp: a bit flips in a moment on rank 3
ddp: rank 1 multiplies wrongly
ddp: rank 2 reads a batch again
ddp: loader not restored on all ranks
ddp: bad losses on rank 2 with the server dead
ddp: with every rule acting, 1
fsdp2: inf in backward on rank 3
fsdp2: nan in data on rank 0
fsdp2: a moment on rank 1
fsdp2: a bit flips in a weight on rank 2
fsdp2: rank 3 multiplies wrongly
fsdp2: the highest bit flips in an activation on rank 1
fsdp2: rng not restored on rank 3
fsdp2: with samples of all lengths, 1
pipeline: nan in forward on rank 1
pipeline: inf in backward on rank 2
pipeline: nan in data on rank 0
pipeline: nan in loss on rank 3
pipeline: a bit flips in a weight on rank 0
pipeline: rank 3 multiplies wrongly
pipeline: a loss spike of one step
pipeline: an overlong sample returns each epoch, first on rank 1
pipeline: ordinary, 1
""".strip().splitlines()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    from campaign import launching
    from campaign.judging import judge
    from campaign.table import all_cases

    cases = [case for case in all_cases() if case.name in NAMES]
    seen = launching.play(cases, tmp_path_factory.mktemp("campaign"), 200.0)
    return {case.name: judge(case, seen[case.name]) for case in cases}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_where_it_is_and_all_ranks_act_alike(verdicts, name):
    verdict = verdicts[name]
    assert verdict.wrong == []
    assert verdict.together
    assert verdict.applied == 0
    assert verdict.found or verdict.case.expect.miss
