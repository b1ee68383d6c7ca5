"""What values are spaced by: a loss computed in bf16, or printed with two decimals, moves in steps.

Where every value of a window lies on such a grid its median absolute deviation may be 0 although the loss is
not constant: what is known of it is only as fine as the grid.
"""

from collections.abc import Collection

BF16_QUANTUM = 1 / 128  # spacing of bf16 values in [1, 2), where a trained model's loss lies
UNROUNDED = 5  # decimals: no training is so quiet that four hide its noise, so what has more is no rounding


def places_of(value: float) -> int:
    """Return how many decimals a value's shortest form has, at most UNROUNDED: 2 for 2.31, 1 for 2.3."""
    # What is far from any multiple of 1e-4 is the usual case, and needs no search.
    if -1e6 < value < 1e6 and 1e-4 < value * 1e4 % 1.0 < 0.9999:
        return UNROUNDED
    return next((places for places in range(UNROUNDED) if round(value, places) == value), UNROUNDED)


def grid(places: int, *, bf16: bool, printed: bool = False) -> float:
    """Return the spacing of values that have so many decimals; 0: they are not rounded.

    Args:
        bf16: whether all of them are multiples of 1/128.
        printed: the decimals are those that were printed ("2.30" has two). A few values by themselves may
            show fewer, so there bf16's grid is taken where both would do, as the finer one.
    """
    decimal = 0.0 if places >= UNROUNDED else 10.0**-places
    if not bf16:
        return decimal
    return max(decimal, BF16_QUANTUM) if printed else BF16_QUANTUM


def quantum_of(values: Collection[float], places: int | None = None) -> float:
    """Return the spacing of finite values, 0 where they are not rounded or there is none.

    Args:
        places: decimals that they were printed with, where that is known.
    """
    if not values:
        return 0.0
    on_bf16 = not any(value % BF16_QUANTUM for value in values)
    if places is not None:
        return grid(places, bf16=on_bf16, printed=True)
    return grid(max(map(places_of, values)), bf16=on_bf16)
