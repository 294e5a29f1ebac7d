"""The models that jobs may train: the one that is served, and those that are trained beside it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coserve.models.base import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """Facts about a model that jobs need."""

    name: str
    """The name by which clients and jobs call the model."""
    architecture: Architecture
    tokenizer: "PreTrainedTokenizerBase | None"
    max_positions: int | None = None
    """Positions of the longest example; None: as many as the model was made for."""
    end_tokens: frozenset[int] = frozenset()
    """Ids at which generation stops; empty if they are not known."""


class JobModels:
    """By name. Jobs on others wait until a server has their model."""

    def __init__(self, served: BaseModel, others: Collection[BaseModel] = ()) -> None:
        """others: whose names differ from each other's and from that of the one that is served."""
        self.served = served
        self._by_name = {model.name: model for model in (served, *others)}

    def find(self, name: str) -> BaseModel | None:
        """None: it is not here."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> BaseModel:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def others(self) -> tuple[str, ...]:
        """Names of those that are not served."""
        return tuple(name for name in self._by_name if name != self.served.name)

    def engine_name(self, name: str) -> str:
        """What the engine calls it; "" for the one that it serves."""
        return "" if name == self.served.name else name
