"""Errors of Ray, in one line."""

import pytest

from coserve.cluster.ray.errors import first_line, last_error

# Of Ray 2.60, where a machine has another version of it than the cluster.
MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.50.0
    Python: 3.11.2
This process on 192.0.2.7:0 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""
SAID = (
    "Version mismatch: The cluster was started with: Ray: 2.50.0 Python: 3.11.2 "
    "This process on 192.0.2.7:0 was started with: Ray: 2.60.0 Python: 3.11.7"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(MISMATCH), SAID),
        (ConnectionError("\n  it is gone\nsee the log"), "it is gone"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_of_an_error_the_first_line_or_all_where_that_says_nothing_yet(error: Exception, said: str):
    assert first_line(error) == said


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            'Traceback (most recent call last):\n  File "node.py", line 625\n'
            f"RuntimeError: {MISMATCH}",
            SAID,
        ),
        ("Usage: ray start\n\nError: No such option: --block-all\n", "No such option: --block-all"),
        (
            "ray.exceptions.RayTaskError(RuntimeError): ray::ready()\n  raise e\nRuntimeError: "
            "Failed to bind\n",
            "Failed to bind",
        ),
        ("it begins\nit ends\n", "it ends"),
        ("\n", None),
    ],
)
def test_of_a_process_its_error_or_else_its_last_line(stderr: str, said: str | None):
    assert last_error(stderr) == said
