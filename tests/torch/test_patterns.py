"""Patterns of modules mean what they mean in PEFT, and none, however it is made, takes long to
match."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from support import CONFIGS, make_backbone

from coserve.adapters import LoraConfig
from coserve.adapters.patterns import compile_pattern
from coserve.errors import AdapterError, JobError
from coserve.jobs.settings import job_settings

# How long a process may take before it counts as hung; the patterns below take a backtracking
# engine for ever.
HUNG_S = 120
EVIL = [
    "([a-z_.0-9]+)+X",
    "(a|[a-z_.0-9])*(.*)*X",
    "(.*)*" * 500 + "X",
    r"((\w|\.)*)*!",
    "(([a-z.]{0,30}){0,30}){0,1}X",
]


def modules(family: str = "llama") -> list[str]:
    """Modules that a LoRA may sit at: linear ones, and the embeddings."""
    return list(LoraConfig().can_be_targets(make_backbone(family).architecture))


def chosen(**lora: object) -> set[str]:
    """Ours; nothing if nothing matches."""
    try:
        return set(LoraConfig(**lora).sites(make_backbone().architecture, every_target=False))  # type: ignore[arg-type]
    except AdapterError:
        return set()


def chosen_by_peft(**lora: object) -> set[str]:
    config = PeftLoraConfig(**lora)
    return {module for module in modules() if check_target_module_exists(config, module)}


PATTERNS = [
    r".*\.(q|k)_proj",
    r"q_proj",
    r"model\.layers\.[02]\..*v_proj",
    r"(?:.*\.)?layers\.(?P<number>\d+)\.self_attn\.[qkv]_proj",
    r"(?i).*Q_PROJ",
    r".*?o_proj$",
    r"^model.*down_proj",
    r".*\bq_proj",
    r".*layers\.\d{1,2}\.mlp\.(gate|up)_proj",
    r"(.*)(q)(_)(proj)",
    r".*\.[^.]*_proj",
    r".*\Aq_proj",
    r"(a|ab|.*q_proj|.*)",
    r".*\x71_proj",
    r".*q\_proj",
    r"(?s:.+)_proj",
    r".*layers\.1\.((self_attn\.[qv])|(mlp\.up))_proj",
    r"lm_hea.",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_chooses_what_it_chooses_in_peft(pattern):
    assert chosen(target_modules=pattern) == chosen_by_peft(target_modules=pattern)
    excluded = {
        "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"],
        "exclude_modules": pattern,
    }
    assert chosen(**excluded) == chosen_by_peft(**excluded)


@pytest.mark.parametrize(
    "names",
    [
        ["q_proj"],
        ["proj"],
        ["self_attn.q_proj", "mlp"],
        ["model.layers.1.mlp.up_proj"],
        [".q_proj"],
        [""],
    ],
)
def test_a_list_chooses_by_the_ends_of_names_as_in_peft(names):
    assert chosen(target_modules=names) == chosen_by_peft(target_modules=names)
    excluded = {"target_modules": ["q_proj", "up_proj"], "exclude_modules": names}
    assert chosen(**excluded) == chosen_by_peft(**excluded)


@pytest.mark.parametrize(
    "pattern", ["layers", "model.layers", "l[a-z]*", "h|layers", "layers|h", "(layers)", r"\w+"]
)
def test_blocks_are_found_as_in_peft(pattern):
    for layers in (1, [0, 2], [7]):
        lora = {
            "target_modules": ["q_proj", "up_proj"],
            "layers_to_transform": layers,
            "layers_pattern": pattern,
        }
        assert chosen(**lora) == chosen_by_peft(**lora)


_PIECES = st.sampled_from(
    [
        "q_proj",
        "k_proj",
        "mlp",
        "layers",
        "model",
        r"\d",
        r"\w+",
        "[qv]",
        "1",
        "(a|q)",
        ".*",
        ".",
        r"\.",
        "?",
        "+",
        "^",
        "$",
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(_PIECES, min_size=1, max_size=5).map("".join), min_size=1, max_size=3, unique=True
    )
)
def test_ranks_by_pattern_are_pefts(patterns):
    ranks = {pattern: number for number, pattern in enumerate(patterns, 2)}
    try:
        for pattern in patterns:
            re.compile(pattern)
            re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        with pytest.raises(ValueError, match="is no regular expression"):
            LoraConfig(rank_pattern=ranks)
        return
    if any(re.search(r"[?+*]\+", pattern) for pattern in patterns):  # possessive
        with pytest.raises(ValueError, match="RE2"):
            LoraConfig(rank_pattern=ranks)
        return
    config = LoraConfig(rank_pattern=ranks, alpha_pattern=dict(ranks), target_modules="all-linear")
    for module in modules():
        expected = ranks.get(get_pattern_key(patterns, module), 8)
        assert config.rank(module) == expected
        assert config.scaling(module) == 1.0


@pytest.mark.long
def test_no_pattern_hangs():
    """In a process of its own, which ends; with an engine that backtracks it never would."""
    settings_ = ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern"]
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support import make_backbone
from coserve.adapters import LoraConfig
from coserve.errors import AdapterError
for setting in {settings_!r}:
    for pattern in {EVIL!r}:
        value = {{pattern: 4}} if setting == "rank_pattern" else pattern
        more = {{"target_modules": ["q_proj"], "layers_to_transform": 1}} if setting == "layers_pattern" else {{}}
        try:
            config = LoraConfig(**{{**more, setting: value}})
            for module in config.sites(make_backbone().architecture):
                config.rank(module)
        except (AdapterError, ValueError) as error:
            pass
    print(setting, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG_S
    )
    assert done.stdout.split() == settings_, done.stderr


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"(q)_proj\1", "it has a backreference"),
        (r"(?P<x>q)_proj(?P=x)", "RE2, which has no backreferences, look-around"),
        (r"(?=.*q)_proj", "RE2, which has no backreferences, look-around"),
        (r".*(?<!k)_proj", "RE2, which has no backreferences, look-around"),
        (r"(?>q)_proj", "RE2"),
        (r"q_proj\Z", "RE2"),
        (r"(([a-z.]{0,900})q){0,900}", "RE2"),
        (r"q{,3}_proj", r"write \{0,n\}"),
        ("(" * 2000 + ")" * 2000, "is no regular expression"),
        ("(", "is no regular expression"),
        ("q" * 4097, "has a pattern of 4097 characters; 4096 are allowed"),
        ("é", "must be of ASCII characters"),
    ],
)
def test_what_is_not_matched_is_refused_with_the_reason(pattern, said):
    for given_ in (
        {"target_modules": pattern},
        {"exclude_modules": pattern},
        {"rank_pattern": {pattern: 2}},
    ):
        with pytest.raises(ValueError, match=said) as caught:
            LoraConfig(**given_)
        assert len(str(caught.value)) < 500
        assert str(caught.value).startswith(next(iter(given_)))


@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_classes_that_python_reads_otherwise_are_refused():
    with pytest.raises(ValueError, match="it has"):
        compile_pattern("target_modules", "[[:alpha:]_]*q_proj")


def test_there_is_a_bound_to_names_and_patterns():
    for given_ in (
        {"target_modules": ["x"] * 5000},
        {"exclude_modules": ["x" * 100] * 1000},
        {"rank_pattern": {f"q{n}": 2 for n in range(5000)}},
        {"alpha_pattern": {f"{n:100d}": 2 for n in range(1000)}},
        {"target_modules": ["q_proj"], "layers_to_transform": list(range(5000))},
    ):
        with pytest.raises(ValueError, match="are allowed"):
            LoraConfig(**given_)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_module_may_have_a_rank_of_its_own(family):
    ranks = {re.escape(module): number for number, module in enumerate(modules(family), 2)}
    config = LoraConfig(target_modules="all-linear", rank_pattern=ranks)
    assert all(config.rank(module) == ranks[re.escape(module)] for module in modules(family))


def test_a_job_is_told_at_once():
    for adapter in (
        {"target_modules": EVIL[0]},
        {"target_modules": r"(q)\1"},
        {"rank_pattern": {"(?=q)": 2}},
    ):
        with pytest.raises(JobError) as caught:
            job_settings(
                hyperparameters={},
                extension={"adapter": adapter},
                seed=0,
                architecture=make_backbone().architecture,
                is_fresh=True,
            )
        assert caught.value.param in ("coserve.adapter", "coserve.adapter.target_modules")
