"""PEFT's methods with the settings that tests try, and what PEFT and coserve say of the same
adapter."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import peft
import torch
from support import make_backbone, make_model
from torch import Tensor, nn

from coserve.adapters import Adapter, load_adapter, save_adapter
from coserve.adapters.base import PEFT_PREFIX, AdapterConfig
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.methods import method
from coserve.adapters.peft_directory import read_config
from coserve.adapters.reparametrization import Reparametrization
from coserve.adapters.virtual_tokens import EncodedTable
from coserve.engine.checks import with_virtual_tokens
from coserve.engine.request import virtual_tokens
from coserve.models import CachedSequence, forward, logits
from coserve.tuning import TrainingPass, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.examples import Example
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.pack import pack_of

Sequences = list[tuple[list[int], list[bool]]]
ATTENTION = ["q_proj", "v_proj"]
ANYTHING = r"(.*\.)?"
LAST_OF_MLP = rf"{ANYTHING}(down_proj|fc_out)"
MIXTURE = "qwen3-moe"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method with its settings, as a job's `coserve.adapter`, and as PEFT's configuration, or
    (where PEFT has none) as what makes a transformers model into what the paper defines. scale: of
    the random numbers that are added to its initial values. is_encoded: directories hold what a
    network gives, and not the network that is trained. is_gated: what is trained has random gates;
    here it is what directories hold.
    """

    job: dict[str, Any]
    peft: Callable[[], Any] | None = None
    define: Callable[[Any, dict[str, Any]], None] | None = None
    scale: float = 0.15
    is_encoded: bool = False
    is_gated: bool = False
    families: tuple[str, ...] = ("qwen2", "gptj", MIXTURE)


# Of methods at all linear layers: PEFT's would also be a mixture's router.
DENSE = ("qwen2", "gptj")


def _lora(**settings: Any) -> Callable[[], Any]:
    common = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return lambda: peft.LoraConfig(**{**common, **settings})


class _Bottleneck(nn.Module):
    def __init__(self, inner: nn.Linear, size: int) -> None:
        super().__init__()
        self.inner = inner
        self.adapter_down = nn.Sequential(nn.Linear(inner.out_features, size), nn.SiLU())
        self.adapter_up = nn.Linear(size, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        found: Tensor = y + self.adapter_up(self.adapter_down(y))
        return found


def _define_bottleneck(model: Any, job: dict[str, Any]) -> None:
    for name, module in list(model.named_modules()):
        if re.fullmatch(job["target_modules"], name):
            parent, _, attribute = name.rpartition(".")
            size = int(module.out_features / job["reduction_factor"])
            setattr(model.get_submodule(parent), attribute, _Bottleneck(module, size))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter_" in name)


class _Difference(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.difference = inner, nn.Parameter(torch.zeros_like(inner.weight))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + x @ self.difference.T
        return found


def _define_difference(model: Any, job: dict[str, Any]) -> None:
    for name, module in list(model.named_modules()):
        if name.endswith(tuple(job["target_modules"])):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, _Difference(module))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("difference" in name)


def _define_bitfit(model: Any, job: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        is_of_mixture = ".router." in name or ".experts." in name
        parameter.requires_grad_(name.endswith(".bias") and not is_of_mixture)


CASES: dict[str, Case] = {
    "lora": Case(peft=_lora(), job={"type": "lora", "r": 4, "alpha": 6}, families=DENSE),
    "lora-attention": Case(
        peft=_lora(target_modules=ATTENTION),
        job={"type": "lora", "r": 4, "alpha": 6, "target_modules": ATTENTION},
        families=(MIXTURE,),
    ),
    "rslora": Case(
        peft=_lora(use_rslora=True),
        job={"type": "lora", "r": 4, "alpha": 6, "use_rslora": True},
        families=DENSE,
    ),
    "lora-patterns": Case(
        peft=_lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 9}),
        job={
            "type": "lora",
            "r": 4,
            "alpha": 6,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 9},
        },
        families=DENSE,
    ),
    "rslora-attention": Case(
        peft=_lora(use_rslora=True, target_modules=ATTENTION),
        job={"type": "lora", "r": 4, "alpha": 6, "use_rslora": True, "target_modules": ATTENTION},
        families=(MIXTURE,),
    ),
    "lora-patterns-attention": Case(
        peft=_lora(
            rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 9}, target_modules=ATTENTION
        ),
        job={
            "type": "lora",
            "r": 4,
            "alpha": 6,
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 9},
        },
        families=(MIXTURE,),
    ),
    "lora-bias": Case(
        peft=_lora(lora_bias=True, target_modules=ATTENTION),
        job={"type": "lora", "r": 4, "alpha": 6, "lora_bias": True, "target_modules": ATTENTION},
    ),
    "dora": Case(
        peft=_lora(use_dora=True),
        job={"type": "lora", "r": 4, "alpha": 6, "use_dora": True},
        families=DENSE,
    ),
    "dora-attention": Case(
        peft=_lora(use_dora=True, target_modules=ATTENTION),
        job={"type": "lora", "r": 4, "alpha": 6, "use_dora": True, "target_modules": ATTENTION},
        families=(MIXTURE,),
    ),
    "pissa": Case(
        peft=_lora(init_lora_weights="pissa"),
        job={"type": "lora", "r": 4, "alpha": 6, "init_lora_weights": "pissa"},
        families=DENSE,
    ),
    "pissa-attention": Case(
        peft=_lora(init_lora_weights="pissa", target_modules=ATTENTION),
        job={
            "type": "lora",
            "r": 4,
            "alpha": 6,
            "init_lora_weights": "pissa",
            "target_modules": ATTENTION,
        },
        families=(MIXTURE,),
    ),
    "olora": Case(
        peft=_lora(init_lora_weights="olora", target_modules=ATTENTION),
        job={
            "type": "lora",
            "r": 4,
            "alpha": 6,
            "init_lora_weights": "olora",
            "target_modules": ATTENTION,
        },
    ),
    "ia3": Case(
        peft=lambda: peft.IA3Config(
            target_modules=f"({ANYTHING}[kv]_proj|{LAST_OF_MLP})",
            feedforward_modules=LAST_OF_MLP,
            task_type="CAUSAL_LM",
        ),
        job={
            "type": "ia3",
            "target_modules": f"({ANYTHING}[kv]_proj|{LAST_OF_MLP})",
            "feedforward_modules": LAST_OF_MLP,
        },
    ),
    "vera": Case(
        peft=lambda: peft.VeraConfig(r=6, target_modules="all-linear", task_type="CAUSAL_LM"),
        job={"type": "vera", "r": 6},
        families=DENSE,
    ),
    "vera-attention": Case(
        peft=lambda: peft.VeraConfig(r=6, target_modules=ATTENTION, task_type="CAUSAL_LM"),
        job={"type": "vera", "r": 6, "target_modules": ATTENTION},
        families=(MIXTURE,),
    ),
    "prompt-tuning": Case(
        peft=lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        job={"type": "prompt_tuning", "num_virtual_tokens": 3},
        families=("qwen2", "gptj", "opt", "gemma2", "granite", MIXTURE),
    ),
    "prefix-tuning": Case(
        peft=lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        job={"type": "prefix_tuning", "num_virtual_tokens": 3},
    ),
    "p-tuning": Case(
        peft=lambda: peft.PromptEncoderConfig(
            num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"
        ),
        job={"type": "p_tuning", "num_virtual_tokens": 3, "encoder_hidden_size": 8},
        is_encoded=True,
        families=("qwen2", "gptj", "gemma2", "granite", MIXTURE),
    ),
    "prefix-projection": Case(
        peft=lambda: peft.PrefixTuningConfig(
            num_virtual_tokens=3,
            prefix_projection=True,
            encoder_hidden_size=8,
            task_type="CAUSAL_LM",
        ),
        job={
            "type": "prefix_tuning",
            "num_virtual_tokens": 3,
            "prefix_projection": True,
            "encoder_hidden_size": 8,
        },
        is_encoded=True,
    ),
    "bottleneck": Case(
        define=_define_bottleneck,
        job={
            "type": "bottleneck",
            "reduction_factor": 4,
            "target_modules": f"({ANYTHING}o(ut)?_proj|{LAST_OF_MLP})",
        },
    ),
    "diff-pruning": Case(
        define=_define_difference,
        job={"type": "diff_pruning", "target_modules": ATTENTION, "fraction": 0.1},
        is_gated=True,
    ),
    "lora-whole": Case(
        peft=_lora(target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"]),
        job={
            "type": "lora",
            "r": 4,
            "alpha": 6,
            "target_modules": ATTENTION,
            "modules_to_save": ["embed_tokens", "lm_head"],
        },
        families=("qwen2", "llama-biases-tied", MIXTURE),
    ),
    "lora-whole-parallel": Case(
        peft=_lora(target_modules=ATTENTION, modules_to_save=["wte", "lm_head"]),
        job={
            "type": "lora",
            "r": 4,
            "alpha": 6,
            "target_modules": ATTENTION,
            "modules_to_save": ["wte", "lm_head"],
        },
        families=("gptj",),
    ),
    "bitfit": Case(
        define=_define_bitfit, job={"type": "bitfit"}, families=("qwen2", "gptj", "opt", "gpt-oss")
    ),
}


def config_of(case: str) -> AdapterConfig:
    """As a job's settings say it."""
    settings = dict(CASES[case].job)
    kind = method(settings.pop("type"))
    return kind(**{**kind.job_defaults, **settings})


@cache
def peft_directory(case: str, family: str, seed: int = 0) -> Path:
    """Where PEFT has saved an adapter of this kind with random values; where PEFT has none, we
    have."""
    directory, theirs = Path(mkdtemp(prefix=f"coserve-{case}-")), reference(case, family, seed)
    if CASES[case].peft is not None:
        theirs.save_pretrained(directory)
    else:
        config, tensors = (
            config_of(case),
            {name: parameter.data for name, parameter in trained(theirs)},
        )
        layout = AdapterLayout.of(config, make_backbone(family).architecture, every_target=False)
        masters = config.from_peft_tensors(tensors, layout)
        save_adapter(
            Adapter(make_backbone(family), config, every_target=False, masters=masters), directory
        )
    return directory


def reference(case: str, family: str, seed: int = 0) -> Any:
    """PEFT's model, or one as the paper defines it, none of whose parameters is what it was at
    first."""
    found, base = CASES[case], make_model(family)
    torch.manual_seed(seed)
    if found.peft is not None:
        base = peft.get_peft_model(base, found.peft())
    elif found.define is not None:
        found.define(base, found.job)
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in trained(base):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(noise * found.scale)
    return base.eval()


def trained(model: Any) -> list[tuple[str, Tensor]]:
    """What is trained, by its names in PEFT's files."""
    return [
        (
            (name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name)
            .replace(".modules_to_save.default", "")
            .replace(".default", "")
            .replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            .replace(f"{PEFT_PREFIX}prompt_encoder.embedding.weight", "prompt_embeddings"),
            parameter,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def ours_of(case: str, family: str, seed: int = 0) -> "Ours":
    """The same adapter, by way of PEFT's directory."""
    directory = peft_directory(case, family, seed)
    ours = Ours(
        load_adapter(make_backbone(family), directory),
        read_config(directory),
        as_saved=CASES[case].is_gated,
    )
    if CASES[case].is_encoded:
        theirs = {
            name.rpartition("prompt_encoder.")[2]: value.data
            for name, value in trained(reference(case, family, seed))
        }
        for name, value in ours.parameters.items():
            value.copy_(theirs["prompt_embeddings" if name == "embedding.weight" else name])
        assert ours.replaced is not None
        ours.replaced.apply(ours.adapter)
    return ours


class Ours:
    """An adapter, and what a job would train of it: `parameters`, by their names in PEFT's
    files."""

    def __init__(self, adapter: Adapter, config: AdapterConfig, *, as_saved: bool = False) -> None:
        """config: as a job or a directory says it. as_saved: what is trained is what directories
        hold."""
        self.adapter, self.config = adapter, config
        self.replaced: Reparametrization | None = None
        if not as_saved:
            self.replaced = config.reparametrization(adapter, torch.Generator().manual_seed(0))
        self.parameters = adapter.masters if self.replaced is None else self.replaced.parameters

    @classmethod
    def of_directory(cls, adapter: Adapter) -> "Ours":
        return cls(adapter, adapter.config, as_saved=True)

    def gradients(self, sequences: Sequences, budget: int | None = None) -> dict[str, Tensor]:
        """Of the summed loss, by our names. budget: bytes that a block may keep of a row."""
        examples = [Example(tokens=tuple(ids), trained=tuple(marks)) for ids, marks in sequences]
        pack = pack_of(with_virtual_tokens(examples, self.num_virtual, 100))
        training = TrainingPass(
            self.adapter, training_programs(self.adapter, budget_bytes_per_token=budget), pack
        )
        run_alone(training, forward_rows=7, backward_rows=5)
        return (
            training.gradients
            if self.replaced is None
            else self.replaced.pull_back(training.gradients, num_trained=1)
        )

    def in_peft(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values of what is trained, by the names and in the shapes of PEFT's files."""
        if isinstance(self.replaced, EncodedTable):
            names = {name: f"{PEFT_PREFIX}prompt_encoder.{name}" for name in values}
            return {
                "prompt_embeddings" if name == "embedding.weight" else names[name]: value
                for name, value in values.items()
            }
        found = self.config.to_peft_tensors(values, self.adapter.layout)
        return {
            name: tensor
            for name, tensor in found.items()
            if name not in ("base_model.vera_A", "base_model.vera_B")
        }

    @property
    def num_virtual(self) -> int:
        return self.adapter.config.num_virtual_tokens

    def with_virtual(self, tokens: Tensor) -> Tensor:
        return torch.cat(
            (torch.tensor(virtual_tokens(self.num_virtual), dtype=torch.int64), tokens)
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the rows of these tokens."""
        backbone, bypasses, rows = (
            self.adapter.backbone,
            self.adapter.bypasses(),
            self.with_virtual(tokens),
        )
        hidden = forward(backbone, [CachedSequence(backbone, len(rows), bypasses).extend(rows)])
        return logits(backbone, hidden, [(len(rows), bypasses)])[self.num_virtual :]

    def train(self, batches: list[Sequences], config: OptimizerConfig) -> None:
        optimizer = AdapterOptimizer(self.parameters, config)
        for batch in batches:
            optimizer.step(self.gradients(batch), num_trained=1, num_steps=len(batches))
            if self.replaced is None:
                self.adapter.sync_compute_copy()
            else:
                self.replaced.apply(self.adapter)


def peft_logits(model: Any, tokens: Tensor) -> Tensor:
    """Of the rows of these tokens."""
    with torch.no_grad():
        found: Tensor = model(tokens[None]).logits[0]
    return found[-len(tokens) :]


def peft_loss(model: Any, sequences: Sequences) -> Tensor:
    """Summed over the trained tokens; the first of a sequence has no row before it that counts."""
    loss = torch.zeros(())
    for ids, marks in sequences:
        rows = model(torch.tensor([ids])).logits[0][-len(ids) : -1]
        each = nn.functional.cross_entropy(rows, torch.tensor(ids[1:]), reduction="none")
        loss = loss + each[torch.tensor(marks[1:])].sum()
    return loss


def peft_gradients(model: Any, sequences: Sequences) -> dict[str, Tensor]:
    """Autograd's, of the summed loss, by the names in PEFT's files."""
    model.zero_grad()
    torch.autograd.backward(peft_loss(model, sequences))
    return {
        name: parameter.grad.clone()
        for name, parameter in trained(model)
        if parameter.grad is not None
    }


def train_peft(model: Any, batches: list[Sequences], config: OptimizerConfig) -> None:
    """Steps of AdamW on summed losses, clipped as jobs clip."""
    parameters = [parameter for _, parameter in trained(model)]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay
    )
    for batch in batches:
        peft_gradients(model, batch)
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
