"""Thirty cases of the campaign, in one launch of four ranks; `make campaign` plays all."""

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("campaign"), pytest.mark.timeout(240)]

NAMES = """
""".strip().splitlines()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    from campaign import launching
    from campaign.judging import judge
    from campaign.table import all_cases

    cases = [case for case in all_cases() if case.name in NAMES]
    seen = launching.play(cases, tmp_path_factory.mktemp("campaign"), 120.0)
    return {case.name: judge(case, seen[case.name]) for case in cases}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_where_it_is_and_all_ranks_act_alike(verdicts, name):
    verdict = verdicts[name]
    assert verdict.wrong == []
    assert verdict.together
    assert verdict.applied == 0
    assert verdict.found or verdict.case.expect.miss
