"""Models that jobs may train: the one that is served, and those that are only trained."""

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
    """Name by which clients and jobs refer to the model."""
    architecture: Architecture
    """Architecture of the model."""
    tokenizer: "PreTrainedTokenizerBase | None"
    """Tokenizer of the model; None if it has none."""
    max_positions: int | None = None
    """Longest example in tokens; None: as long as the model was made for."""
    end_tokens: frozenset[int] = frozenset()
    """Ids at which generation stops; empty if they are not known."""


class JobModels:
    """The models of a server, by name. Jobs on other models wait for a server that has them."""

    def __init__(self, served: BaseModel, others: Collection[BaseModel] = ()) -> None:
        """Set the model that is served, and the others, all with different names."""
        self.served = served
        self._by_name = {model.name: model for model in (served, *others)}

    def find(self, name: str) -> BaseModel | None:
        """Return a model; None if this server does not have it."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> BaseModel:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the models that are not served."""
        return tuple(name for name in self._by_name if name != self.served.name)

    def engine_name(self, name: str) -> str:
        """Return the name of a model in the engine; "" is the one that it serves."""
        return "" if name == self.served.name else name
