"""What the cursor says of many backward windows at once is what it says of one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from coserve.tuning.cursor import Cursor


def make_cursor(num_rows: int, num_parts: int) -> Cursor:
    """Of a pack whose loss is done."""
    cursor = Cursor(num_rows=num_rows, num_trained=1, num_parts=num_parts)
    cursor.advance_forward(num_rows)
    cursor.advance_loss(1)
    return cursor


@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12)), max_size=6),
)
def test_many_tasklets_are_as_one_after_the_other(num_rows, num_parts, asked):
    at_once, one_by_one = make_cursor(num_rows, num_parts), make_cursor(num_rows, num_parts)
    for max_rows, number in asked:
        sizes: list[int] = []
        while len(sizes) < number and one_by_one.num_parts_done < num_parts:
            start, end = one_by_one.next_backward(max_rows)
            one_by_one.advance_backward(end - start)
            sizes.append(end - start)
        if sizes:
            assert at_once.next_tasklets(max_rows, len(sizes)) == sizes
            at_once.advance_tasklets(max_rows, len(sizes))
        assert vars(at_once) == vars(one_by_one)
