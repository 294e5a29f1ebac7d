"""An objective is one file over HTTP, too: bodies take what the registry has."""

import json
import subprocess
import sys
from pathlib import Path

from support import make_backbone

from coserve.jobs.settings import job_settings
from coserve.tuning.objectives import objective_names

OBJECTIVE = """
from dataclasses import dataclass

from coserve.tuning.objectives.simpo import Simpo


@dataclass(frozen=True, kw_only=True)
class LikeSimpo(Simpo):
    weight: float = 1.5
"""

READ = """
import json, sys
import coserve.tuning.objectives as objectives

objectives.__path__.append(sys.argv[1])

from coserve.server.bodies.reader import read_body
from coserve.server.fine_tuning.schemas import CreateJobBody

for method in json.loads(sys.argv[2]):
    try:
        body = read_body(CreateJobBody, json.dumps({"model": "m", "training_file": "f", "method": method}).encode())
        own = getattr(body.method, body.method.type)
        made = objectives.make_objective(body.method.objective, own.hyperparameters)
        print(type(made).__name__, made.weight)
    except Exception as error:
        print(error.param, error)
"""


def test_a_file_beside_the_objectives_is_a_method_of_jobs(tmp_path: Path):
    (tmp_path / "like_simpo.py").write_text(OBJECTIVE)
    methods = [
        {"type": "like_simpo", "like_simpo": {"hyperparameters": {"weight": 2.5}}},
        {"type": "like_sympo"},
        {"type": "like_simpo", "like_simpo": {"parameters": {}}},
    ]
    command = [sys.executable, "-c", READ, str(tmp_path), json.dumps(methods)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made, unknown, wrong = done.stdout.splitlines()
    assert made == "LikeSimpo 2.5"
    assert unknown.startswith("method.type ") and "like_simpo" in unknown
    assert wrong.startswith("method.like_simpo.parameters ")


def test_every_objective_of_the_registry_makes_settings_of_a_job():
    for name in objective_names():
        made = job_settings(
            hyperparameters={},
            extension={},
            seed=0,
            architecture=make_backbone().architecture,
            is_fresh=True,
            objective=name,
        )
        assert made.objective == name
