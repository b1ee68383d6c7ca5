"""Who stands behind, of an incident without a bad value: a hang names no cell, but a rank is missing."""

import numpy as np

from incidents import launched
from runs import formatting as words
from runs.blocks import NEVER
from runs.grid_progress import LAG_STEPS
from runs.models import Grid
from runs.seen import Seen


def behind(run_id: int, attempt: int) -> str:
    """Return "rank 3 on node-01 never posted step 413, 3 ranks did"; "" when all ranks stand at one step."""
    stored = Grid.objects.filter(run_id=run_id, attempt=attempt).values_list("seen", flat=True).first()
    seen = Seen(bytes(stored)) if stored else None
    if seen is None or not len(seen.last):
        return ""
    newest = int(seen.last.max())
    joined = seen.first < NEVER
    late = np.flatnonzero(joined & (seen.last < newest) & (seen.last >= newest - LAG_STEPS)).tolist()
    there = int((joined & (seen.last == newest)).sum())
    if not late or not there:
        return ""
    places = launched.places(run_id, attempt, late)
    where = f" on {words.inert(places[0].node, 48)}" if len(places) == 1 else ""
    never = f"{words.rank_words(late)}{where} never posted step {words.count(newest)}"
    return f"{never}, {words.plural(there, 'rank')} did"
