"""History of tokens per second over the last day, in rings of parts that are longer for older
times.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimeSpan:
    """A time span that the page can show, divided into equal parts."""

    name: str  # as the page writes it
    length_s: int
    """Length in seconds."""
    part_s: int
    """Length of each part in seconds."""

    @property
    def num_parts(self) -> int:
        return self.length_s // self.part_s


SPANS = (
    TimeSpan(name="1 minute", length_s=60, part_s=1),
    TimeSpan(name="5 minutes", length_s=300, part_s=1),
    TimeSpan(name="1 hour", length_s=3600, part_s=10),
    TimeSpan(name="1 day", length_s=86_400, part_s=300),
)


@dataclass(kw_only=True)
class _Part:
    """Tokens counted within one part of a ring."""

    index: int  # the part's start, in parts since time 0
    num_generated: int = 0
    """Generated tokens."""
    num_trained: int = 0
    """Tokens processed by fine-tuning."""


class TokenHistory:
    """Counter of generated and trained tokens by time, in bounded memory."""

    def __init__(self) -> None:
        # For each length of parts, as many parts as the longest span that uses it.
        num_parts: dict[int, int] = {}
        for span in SPANS:
            num_parts[span.part_s] = max(num_parts.get(span.part_s, 0), span.num_parts)
        # One more than is shown: the newest part isn't over yet.
        self._rings = {
            part_s: deque[_Part](maxlen=number + 1) for part_s, number in num_parts.items()
        }

    def add(self, now_s: float, *, num_generated: int, num_trained: int) -> None:
        """Count tokens at a time, which must not be before those of earlier calls."""
        for part_s, ring in self._rings.items():
            index = int(now_s // part_s)
            if not ring or ring[-1].index != index:
                ring.append(_Part(index=index))
            ring[-1].num_generated += num_generated
            ring[-1].num_trained += num_trained

    def rates(self, span: TimeSpan, now_s: float) -> list[tuple[float, float]]:
        """Return generated and trained tokens per second in each full part of a span, the oldest
        first.
        """
        counted = {part.index: part for part in self._rings[span.part_s]}
        end = int(now_s // span.part_s)
        parts = [counted.get(index) for index in range(end - span.num_parts, end)]
        return [
            (0.0, 0.0)
            if part is None
            else (part.num_generated / span.part_s, part.num_trained / span.part_s)
            for part in parts
        ]
