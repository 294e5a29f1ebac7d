"""What follows for a job whose packs run the device out of memory, so that a step never fails of it for ever.

Each failure holds the job back for some turns of the step loop, in which others run without it: 1, 2, 4, 8, … Its
pieces are half as large when it comes back. A pack that gets done ends the series. After ten failures in a row the
job itself fails.
"""

MOST_FAILURES = 10


class MemoryFailures:
    """Of one job. num_in_a_row: without a pack that got done in between. num_turns: for which it is still held back.
    max_rows: of its largest piece (window, piece of the loss, tasklet); None: no limit.
    """

    def __init__(self) -> None:
        self.num_in_a_row = self.num_turns = 0
        self.max_rows: int | None = None

    @property
    def too_many(self) -> bool:
        """Whether it will not get any further."""
        return self.num_in_a_row >= MOST_FAILURES

    def reason(self, message: str) -> str:
        """Why the job fails then, and what would be right; message: of the last failure."""
        return (
            f"the device ran out of memory {self.num_in_a_row} times in a row in the same pack: {message}; "
            "lower max_sequence_length, or give the engine fewer bytes for pages, so that more is left beside them"
        )

    def note_failure(self, num_rows: int | None = None) -> None:
        """num_rows: of its largest piece in the step that failed; None if no piece had run."""
        self.num_turns = 1 << self.num_in_a_row
        self.num_in_a_row += 1
        if num_rows is not None:
            self.max_rows = max(1, self.limit(num_rows) // 2)

    def note_pack(self) -> None:
        """A pack is done. What its pieces were too large for may be over: they grow again, by an eighth each time."""
        self.num_in_a_row = 0
        if self.max_rows is not None:
            self.max_rows += 1 + self.max_rows // 8

    def note_turn(self) -> None:
        """The step loop has turned once."""
        self.num_turns = max(0, self.num_turns - 1)

    def limit(self, num_rows: int) -> int:
        """Rows of a piece for which this many were planned."""
        return num_rows if self.max_rows is None else min(num_rows, self.max_rows)
