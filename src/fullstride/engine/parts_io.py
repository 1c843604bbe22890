"""Parts of flat buffers into files and back, by torch.distributed.checkpoint's storage in safetensors.

Rank r's parts of the n-th of N units are in one file, `shard-<r + 1>-model-<n>-of-<N>.safetensors`, whose header says
where in the whole buffers they lie. That is all there is to know: any number of ranks can read it, no index is needed,
nothing is a pickle, and neither writing nor reading has to talk to other ranks.

Importing torch.distributed.checkpoint takes most of a second: import this module where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fullstride.errors import ConfigError
from fullstride.parallel.shards import Part

Parts = Mapping[str, Mapping[str, Part]]  # by unit, then by buffer: param, m, ...
REMEDY = "restore it, or resume from another step"


def file_names(rank: int) -> str:
    """A glob pattern for the files of one rank."""
    return f"shard-{rank + 1:05d}-*"


def write_parts(
    folder: Path, parts: Parts, units: Sequence[str], rank: int, ranks: int, check: Callable[[], None]
) -> dict[str, int]:
    """Write rank's parts into `folder`, one unit after the other, and sync them; {file name: bytes}.

    parts: on any device; a unit at a time is copied to the host. units: of all ranks' parts, the same on every rank.
    check: called in between; what it raises ends the writing. Raises OSError when the disk refuses it.
    """
    files = {_key(unit, name): index for index, unit in enumerate(units, 1) for name in parts.get(unit, ())}
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    writer.per_thread_copy_ahead = 0  # copying ahead would make a CUDA context on the first GPU, whoever's that is
    flat = _flat(parts)
    plan = SavePlan([_write_item(key, part) for key, part in flat.items() if part.values.numel()])
    plan = writer.prepare_global_plan([plan] * ranks)[rank]  # which puts the rank into file names
    written = writer.write_data(plan, _Source(flat, check)).wait()
    names = sorted({result.storage_data.relative_path for result in written})
    return {name: (folder / name).stat().st_size for name in names}


class SavedParts:
    """What ranks have written into `folder`: `files`, {file name: bytes}.

    Opening reads headers only. Raises ConfigError, naming the file, for one that is missing, cut off, damaged, or
    nothing that was written.
    """

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self._folder = folder
        for name, size in files.items():
            _check_file(folder / name, size)
        for file in folder.glob("*.safetensors"):
            if file.name not in files:
                raise ConfigError(f"{file}: not a file of this checkpoint; remove it")
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            metadata = self._reader.read_metadata()
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{folder}: damaged ({error!r}); {REMEDY}") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._tensors = metadata.state_dict_metadata

    def check(self, parts: Parts) -> None:
        """Raise ConfigError unless the files hold the whole of the buffers that `parts` are parts of."""
        for key, part in _flat(parts).items():
            saved = self._tensors.get(key)
            if not isinstance(saved, TensorStorageMetadata) or not _fills(saved, part):
                raise ConfigError(f"{self._folder}: {key} is not there as a whole, or of another size; {REMEDY}")

    def read(self, parts: Parts) -> None:
        """Fill `parts`, on any device, which were checked; one buffer at a time passes through the host."""
        flat, items = _flat(parts), []
        for key, part in flat.items():
            saved = self._tensors[key]
            assert isinstance(saved, TensorStorageMetadata)
            if part.values.numel():
                items += create_read_items_for_chunk_list(key, saved, [_chunk(part)])
        self._reader.read_data(LoadPlan(items), _Target(flat)).wait()

    def dtype(self, unit: str, name: str) -> torch.dtype | None:
        """Of a unit's buffer `name`; None where that was not saved."""
        saved = self._tensors.get(_key(unit, name))
        return saved.properties.dtype if isinstance(saved, TensorStorageMetadata) else None

    def whole(self, unit: str, name: str) -> torch.Tensor:
        """A unit's buffer `name`, which was saved, flat, on the CPU."""
        saved = self._tensors[_key(unit, name)]
        assert isinstance(saved, TensorStorageMetadata)
        flat = torch.empty(saved.size, dtype=saved.properties.dtype)
        parts = {unit: {name: Part(flat, 0, flat.numel())}}
        self.check(parts)
        self.read(parts)
        return flat


class _Source(DefaultSavePlanner):
    """Where the storage finds what it writes."""

    def __init__(self, parts: Mapping[str, Part], check: Callable[[], None]) -> None:
        super().__init__()
        self._parts, self._check = parts, check

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        self._check()
        return self._parts[index.fqn].values


class _Target(DefaultLoadPlanner):
    """Where the storage puts what it reads."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.fqn].values


def _key(unit: str, name: str) -> str:
    return f"{unit}.{name}"


def _flat(parts: Parts) -> dict[str, Part]:
    return {_key(unit, name): part for unit in parts for name, part in parts[unit].items()}


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([part.first]), part.values.shape)


def _write_item(key: str, part: Part) -> WriteItem:
    """As a DTensor over `part.size` elements in Shard(0) would make it."""
    data = TensorWriteData(_chunk(part), TensorProperties(part.values.dtype), torch.Size([part.size]))
    return WriteItem(MetadataIndex(key, [part.first]), WriteItemType.SHARD, tensor_data=data)


def _fills(saved: TensorStorageMetadata, part: Part) -> bool:
    """Whether the pieces that were saved follow one another from end to end of the buffer, in its dtype."""
    end = 0
    for chunk in sorted(saved.chunks, key=lambda chunk: tuple(chunk.offsets)):
        if tuple(chunk.offsets) != (end,):
            return False
        end += math.prod(chunk.sizes)
    return saved.size == (part.size,) and end == part.size and saved.properties.dtype == part.values.dtype


def _check_file(file: Path, size: int) -> None:
    if not file.is_file():
        raise ConfigError(f"{file}: missing; {REMEDY}")
    if (found := file.stat().st_size) != size:
        raise ConfigError(f"{file}: {found} bytes, but {size} were written; {REMEDY}")
    try:
        file.open("rb").close()  # which says why where it cannot be; safe_open would say that it is not there
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ConfigError(f"{file}: damaged ({error}); {REMEDY}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror or error}); {REMEDY}") from None
