"""A device is measured once for each model, dtype and state of the code; what lies on disk is used again."""

from support import make_backbone

import coserve
from coserve.engine import profiling
from coserve.simulate.hardware import Hardware, roofline_profile


def test_a_profile_is_measured_once_for_each_model_and_state_of_the_code(tmp_path, monkeypatch):
    measured = []

    def measure(backbone, progress):
        measured.append(backbone)
        return roofline_profile(backbone, Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5))

    monkeypatch.setattr(profiling, "measure_profile", measure)
    llama, qwen = make_backbone("llama"), make_backbone("qwen2")
    first = profiling.load_profile(llama, tmp_path)
    assert profiling.load_profile(llama, tmp_path) == first and measured == [llama]
    profiling.load_profile(qwen, tmp_path)
    assert measured == [llama, qwen]
    monkeypatch.setattr(profiling, "_code", lambda: "another")
    assert profiling.load_profile(llama, tmp_path) == first
    assert measured == [llama, qwen, llama], "other code may be faster"
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert profiling.load_profile(llama, tmp_path) == first and len(measured) == 4, "what is broken is measured again"


def test_the_state_of_the_code_is_that_of_what_is_measured(tmp_path, monkeypatch):
    for name in ("kernels/weights.py", "kernels/cpu/rows.cpp", "server/app.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(coserve, "__file__", str(tmp_path / "__init__.py"))
    states = []
    for name in (None, "server/app.py", "kernels/weights.py", "kernels/cpu/rows.cpp"):
        if name is not None:
            (tmp_path / name).write_text("2")
        profiling._code.cache_clear()
        states.append(profiling._code())
    profiling._code.cache_clear()
    assert states[0] == states[1] and len(set(states)) == 3
