"""Without a terminal a start is lines of the log: one for each stage at once, and some within a
long one."""

import logging

from coserve.cli.start_view import StartLines


def test_each_stage_is_a_line_and_a_long_one_more(caplog):
    now_s = 0.0
    lines = StartLines("warning", time_s=lambda: now_s)
    lines.show("loading libraries")
    for done in range(10):
        now_s += 0.5
        lines.show("compiling kernels", done, 9)
    lines.show("loading weights", 1, 38)
    assert caplog.messages == [
        "loading libraries (0.0 s)",
        "compiling kernels, 0 of 9 (0.5 s)",
        "compiling kernels, 4 of 9 (2.5 s)",
        "compiling kernels, 8 of 9 (4.5 s)",
        "loading weights, 1 of 38 (5.0 s)",
    ]


def test_who_wants_errors_alone_gets_no_lines(caplog):
    lines = StartLines("error")
    lines.show("loading libraries")
    assert not caplog.messages
    logging.getLogger("coserve.start").setLevel(logging.NOTSET)
