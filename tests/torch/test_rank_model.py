"""The model of ranks' speed that `experiments/rank_model.py` makes of its measurements."""

import pytest

from experiments.rank_model import Steps, Times, compared

ASKED = Steps(model="dummy:qwen2.5-0.5b", num_requests=(1, 8), context=64, rows=128, num_turns=2)
ALONE_S = {"decode 1": 0.06, "decode 8": 0.07, "train 128": 1.2}
TOGETHER_S = {"decode 1": 0.04, "decode 8": 0.04, "train 128": 0.7}


def rows_of(sums_us: float, link_flops_per_byte: float = 0.0) -> dict[str, dict[str, float]]:
    """Return what is modelled where every sum takes as long; the slower of two turns does not
    count."""
    times = Times(
        alone_s={name: (2 * seconds, seconds) for name, seconds in ALONE_S.items()},
        together_s={name: (seconds, 2 * seconds) for name, seconds in TOGETHER_S.items()},
        sums_us=((1, sums_us), (1 << 30, sums_us)),
        link_flops_per_byte=link_flops_per_byte,
    )
    return {row["step"]: row for row in compared(ASKED, 2, times)}


def test_steps_of_two_ranks_are_modelled_as_a_share_of_the_whole_and_its_sums():
    rows = rows_of(100.0)
    assert rows.keys() == ALONE_S.keys()
    for name, row in rows.items():
        assert 0.5 < row["share"] < 0.6, "all but norms and additions is halved"
        assert (
            row["whole_ms"] == 1e3 * ALONE_S[name] and row["measured_ms"] == 1e3 * TOGETHER_S[name]
        )
        assert row["modelled_ms"] == pytest.approx(
            row["whole_ms"] * row["share"] + row["sums_ms"], rel=1e-3
        )
        assert row["error"] == pytest.approx(row["modelled_ms"] / row["measured_ms"] - 1, abs=1e-3)
    # Of 24 blocks two sums each, that of the embedding and the gather of the logits.
    assert (
        rows["decode 1"]["sums_ms"]
        == rows["decode 8"]["sums_ms"]
        == pytest.approx(0.1 * (2 * 24 + 2))
    )
    # Forward, the loss' gather and its gradient, two a block backward but for the lowest; two
    # gathers of saved rows.
    assert rows["train 128"]["sums_ms"] == pytest.approx(
        0.1 * (2 * 24 + 1 + 2 + 2 * 24 - 1 + 2 * 24)
    )


def test_slower_sums_add_as_much_as_there_are_of_them():
    fast, slow = rows_of(10.0), rows_of(20.0)
    for name in ALONE_S:
        assert slow[name]["share"] == fast[name]["share"]
        assert slow[name]["sums_ms"] == pytest.approx(2 * fast[name]["sums_ms"], rel=1e-2)


@pytest.mark.parametrize(("link_flops_per_byte", "gathers_of_block"), [(0.0, 2), (1e12, 0)])
def test_the_programs_that_are_modelled_are_those_that_ran(link_flops_per_byte, gathers_of_block):
    """The link's measured pace says what ranks save in pieces, whatever sums take."""
    fast, slow = (rows_of(sums_us, link_flops_per_byte)["train 128"] for sums_us in (100.0, 1e6))
    num_collectives = 2 * 24 + 1 + 2 + 2 * 24 - 1 + gathers_of_block * 24
    assert fast["sums_ms"] == pytest.approx(0.1 * num_collectives)
    assert slow["sums_ms"] == pytest.approx(1e3 * num_collectives)
    assert fast["share"] == slow["share"]
