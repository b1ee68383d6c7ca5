"""A page reads a thing once; what decides reads for itself."""

import pytest

from runs import reading


def counted():
    reads = []

    def read():
        reads.append(len(reads))
        return reads[-1]

    return reads, read


def test_outside_of_a_page_everything_is_read_again():
    reads, read = counted()
    assert [reading.kept("a", read), reading.kept("a", read)] == [0, 1]
    assert len(reads) == 2


def test_a_page_reads_each_thing_once_and_forgets_it():
    reads, read = counted()
    with reading.once():
        assert [reading.kept("a", read), reading.kept("a", read), reading.kept("b", read)] == [0, 0, 1]
    with reading.once():
        assert reading.kept("a", read) == 2
    assert len(reads) == 3


def test_nothing_found_is_found_once_too():
    reads = []
    with reading.once():
        for _ in range(2):
            assert reading.kept("none", lambda: reads.append(1)) is None
    assert len(reads) == 1


def failing(read):
    with reading.once():
        reading.kept("a", read)
        raise ZeroDivisionError


def test_a_page_that_failed_leaves_nothing_behind():
    _, read = counted()
    with pytest.raises(ZeroDivisionError):
        failing(read)
    assert reading.kept("a", read) == 1
