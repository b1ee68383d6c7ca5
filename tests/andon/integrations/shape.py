"""What the loops do and the tests expect of them; without torch."""

BAD_STEPS, BAD_RANK = (4, 5), 1
WIDTH = 8
PER_STEP = 4  # samples of a trainer's step, over both ranks
BACK_TO, LAST = 2, 6  # the checkpoint that the trainers go back to, and where their third act ends
