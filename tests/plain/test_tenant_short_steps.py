"""Jobs in steps that a tight SLO makes short: their tenant's part is saved up, but not for longer
than it grows."""

from tenant_views import NOW_S, decoding, job, plan

from coserve.scheduling.profile import Curve


def test_a_job_gets_what_its_tenant_leaves_of_short_steps_where_no_tenant_owes_it_any():
    streams = (
        decoding("a0", "a", tpot_s=0.15),
        decoding("a1", "a", tpot_s=0.15),
        decoding("b0", "b"),
    )
    assert plan({"a": 1.0, "b": 0.0}, requests=streams, jobs=(job("j", "a"),)).tasklets


def test_a_job_of_a_tenant_that_is_owed_more_than_a_counter_can_say_waits_no_longer():
    """A usual step is long here: the counter never says that its tenant's part of one has been
    saved up."""
    streams, jobs = (decoding("a0", "a", tpot_s=0.15),), (job("j", "b"),)
    made = {
        lead: plan({"a": lead, "b": 0.0}, requests=streams, jobs=jobs, tpot_s=1.0)
        for lead in (0.1, 0.25)
    }
    assert not made[0.1].tasklets and made[0.25].tasklets


def test_a_job_gets_a_piece_that_is_longer_than_a_usual_step_once_it_is_owed_that():
    """The smallest piece takes 160 ms, and a usual step 204 ms, of which a token of the stream
    takes 51 ms."""
    backward = Curve(rows=(1, 4096), seconds=(0.145, 4.24))
    streams, jobs = (decoding("a0", "a", tpot_s=0.08),), (job("j", "b"),)
    made = {
        lead: plan({"a": lead, "b": 0.0}, backward, requests=streams, jobs=jobs)
        for lead in (0.15, 0.25)
    }
    assert not made[0.15].tasklets and made[0.25].tasklets


def test_a_stream_that_has_saved_up_the_time_of_a_usual_step_does_not_make_steps_short():
    """However many of its TPOTs that is."""
    stream = decoding("a0", "a", tpot_s=0.04, first_token_s=NOW_S - 1, num_output=100)
    assert plan({"a": 0.0, "b": 0.0}, requests=(stream,), jobs=(job("j", "b"),)).tasklets
