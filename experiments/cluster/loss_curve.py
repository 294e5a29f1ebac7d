"""Loss of a model by the number of examples that it has been trained on.

Measured on the built-in tiny model by `python -m experiments.staleness` (an Intel Xeon,
2026-11-23): loss on held-out questions of the lesson `zub`, one optimizer step for each example,
200 examples in five epochs.
"""

from bisect import bisect_right

# Examples seen, and loss.
POINTS = (
    *((0, 6.6426), (25, 6.2539), (50, 5.3568), (75, 4.2777), (100, 3.2418), (125, 2.6175)),
    *((150, 2.1832), (175, 1.9054), (200, 1.6767), (225, 1.5223), (250, 1.3983), (275, 1.3029)),
    *((300, 1.2131), (350, 1.1185), (400, 0.9603), (450, 0.8749), (500, 0.7885), (550, 0.735)),
    *((600, 0.6819), (650, 0.6338), (700, 0.5765), (750, 0.5194), (800, 0.4661), (850, 0.4276)),
    *((900, 0.3854), (950, 0.3554), (1000, 0.3061)),
)


def loss_after(num_examples: float) -> float:
    """Return the loss by linear interpolation; after the last point it stays the same."""
    index = bisect_right(POINTS, (num_examples, float("inf")))
    if index == len(POINTS):
        return POINTS[-1][1]
    (x0, y0), (x1, y1) = POINTS[max(0, index - 1)], POINTS[index]
    return y0 + (y1 - y0) * max(0.0, num_examples - x0) / (x1 - x0)
