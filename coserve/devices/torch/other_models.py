"""Models that jobs train beside the one on the device: their weights stay in files, and pass
through a window of the page pool.
"""

from torch import Tensor

from coserve.errors import ModelError, UnsupportedModelError
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models.backbone import Backbone
from coserve.models.families import build_architecture
from coserve.models.mapped_weights import MappedWeights
from coserve.models.source import find_model


class OtherModels:
    """Models by name, each of which is found once.

    One of them at a time has the window: the one whose pack was begun last.
    """

    def __init__(self, served: Backbone, pages: PagedKv) -> None:
        """Begin without models.

        Args:
            served: The model on the device; others have its dtype and its kernels.
            pages: The page pool.
        """
        self._served, self._pages = served, pages
        self._storage: Tensor = pages.storage.view(-1)
        self._backbones: dict[str, Backbone] = {}
        self._windows: dict[str, WeightWindow] = {}
        self._room, self._owner = range(0), ""
        self._resized_s = 0.0

    @property
    def waited_s(self) -> float:
        """Return the seconds for which others waited for weights so far."""
        return sum([window.waited_s for window in self._windows.values()])

    @property
    def num_bytes_copied(self) -> int:
        """Return the bytes of weights that were copied to the window so far."""
        return sum([window.num_bytes_copied for window in self._windows.values()])

    def backbone(self, name: str) -> Backbone:
        """Return the model of a directory or hub id.

        Raises:
            ModelError: There is no such model, or it cannot be trained so, as on a device of
                several ranks.
        """
        if name not in self._backbones:
            self._open(name)
        return self._backbones[name]

    def window(self, name: str) -> WeightWindow:
        """Return the window of weights of a model that was opened."""
        return self._windows[name]

    def resize(self, first_page: int, num_pages: int) -> None:
        """Set the run of pages of the window."""
        size = self._pages.page_bytes
        self._room = range(first_page * size, (first_page + num_pages) * size)
        if self._owner:
            self._resized_s += self._windows[self._owner].resize(self._room)

    def take_resized_s(self) -> float:
        """Return the seconds that weights took to make room (`resize`) since the last call."""
        seconds, self._resized_s = self._resized_s, 0.0
        return seconds

    def give_window(self, name: str) -> None:
        """Give the window to a model whose pack begins."""
        if self._owner not in ("", name):
            self._windows[self._owner].resize(range(0))
        self._owner = name
        self._windows[name].resize(self._room)

    def close(self) -> None:
        """End the threads of all models."""
        for window in self._windows.values():
            window.close()

    def _open(self, name: str) -> None:
        if (num_ranks := self._served.group.size) > 1:
            raise UnsupportedModelError(
                f"a job that trains {name} needs it whole on the device, where {num_ranks} ranks "
                f"divide {self._served.name}: train that model, or start a server without "
                "--tensor-parallel"
            )
        source = find_model(name)
        if source.directory is None:
            raise ModelError(
                f"{name} has no weights in files; a model that is trained through a window needs "
                "them"
            )
        served, architecture = self._served, build_architecture(source.config)
        rotary, max_positions = architecture.rotary_tables(), architecture.max_positions
        mapped = MappedWeights(architecture, source.directory)
        window = WeightWindow(architecture, mapped, self._storage, dtype=served.dtype)
        self._windows[name] = window
        self._backbones[name] = Backbone(
            name=name,
            architecture=architecture,
            weights=window,
            rotary={
                prefix: table.up_to(max_positions).to(served.device)
                for prefix, table in rotary.items()
            },
            max_positions=max_positions,
            dtype=served.dtype,
            device=served.device,
            backend=served.backend,
        )
