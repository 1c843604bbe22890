"""A unit's weights in a checkpoint, whole, without an engine."""

from __future__ import annotations

import torch

from fullstride.engine.parts_io import SavedParts
from fullstride.errors import ConfigError
from fullstride.memory.arena import FlatLayout
from fullstride.model.spec import Unit


class SavedUnit:
    """A unit as it was saved, in the most digits that were. Raises ConfigError for one that was not."""

    def __init__(self, saved: SavedParts, unit: Unit) -> None:
        self.unit, self._saved = unit, saved
        self._name = next((name for name in ("master", "param") if saved.dtype(unit.name, name)), "")
        if not self._name:
            raise ConfigError(f"the checkpoint lacks {unit.name}; export another step")

    @property
    def dtype(self) -> torch.dtype:
        """Of `views`."""
        dtype = self._saved.dtype(self.unit.name, self._name)
        assert dtype is not None
        return dtype

    def views(self) -> dict[str, torch.Tensor]:
        """Its tensors by name."""
        layout = FlatLayout.of((t.name, t.shape, t.decay) for t in self.unit.tensors)
        return layout.views(self._saved.whole(self.unit.name, self._name))
