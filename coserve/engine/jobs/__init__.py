"""Fine-tuning jobs of an engine: their state, their memory, and their lifecycle.

`progress.py` is the state of a job, as one frozen value, and how each event changes it. `job.py` is
one job, `pack.py` a pack of it in memory, `job_set.py` all jobs as the engine uses them.
`lifecycle.py` advances jobs, and does what is due; `memory.py` gives them pages and places on the
host. `opening.py` and `training_data.py` check what a job begins with, `checkpoint.py` is what it
resumes from, `answers.py` evaluates its validation set's questions, and `events.py` is what its
owner sees.
"""
