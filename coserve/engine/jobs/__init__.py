"""Fine-tuning jobs of an engine: what is true of each, the memory that it has, and what moves it
on.

`progress.py` is what is true of a job, as one frozen value, and what each event makes of it.
`job.py` is one job, `pack.py` a pack of it in memory, `job_set.py` all jobs as the engine uses
them. `lifecycle.py` moves jobs on, and does what is due; `memory.py` gives them pages and places on
the host. `opening.py` and `training_data.py` say what a job may begin with, `checkpoint.py` what it
can be resumed from, `answers.py` how its validation set is asked, and `events.py` what its owner is
told.
"""
