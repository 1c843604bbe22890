"""Hugging Face directories, read and written one tensor at a time.

Host memory stays near the largest tensor: nothing here ever holds a whole model, and everything that can be known
without the weights (files, names, shapes, number types) is checked before the first of them is read.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fullstride.errors import ConfigError
from fullstride.files import whole_directory, write_json
from fullstride.model.spec import ModelConfig, Unit, parameter_table

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
# torch's types under safetensors' names: what a weight may be stored as
STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
# elements converted and written at once, so that a write needs no second copy of a large tensor
_PIECE = 1 << 22

# (Hugging Face name, shape, number type, call that returns the tensor)
Source = tuple[str, tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]
Extremes = tuple[float, float]  # the least and the greatest value of a tensor


class PartPlace(NamedTuple):
    """Where one checkpoint tensor lies in the parameter table: rows [start, stop) of `tensor` of unit `unit`."""

    hf_name: str
    unit: int
    tensor: str
    start: int
    stop: int


def parts_of(table: tuple[Unit, ...]) -> list[PartPlace]:
    """All checkpoint tensors of `table`, in its order."""
    return [
        PartPlace(part.hf_name, index, spec.name, part.start, part.stop)
        for index, unit in enumerate(table)
        for spec in unit.tensors
        for part in spec.parts
    ]


# ---------------------------------------------------------------------------------------------------------------------
# reading


class Checkpoint:
    """The weights of a Hugging Face directory: `model.safetensors`, or the shards that its index names.

    Opening reads headers only. Raises ConfigError, naming the file, for a missing directory, missing weights or shard,
    a file that is cut off or damaged, an index that disagrees with its shards, and weights stored as pickles.
    """

    def __init__(self, path: str | Path, weights: str = WEIGHTS) -> None:
        self.path = Path(path)
        index = None if weights != WEIGHTS else _read_index(self.path)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in [self.path / weights] if index is None else sorted({self.path / shard for shard in index.values()}):
            self._read_header(file, index or {})
        for name, shard in (index or {}).items():
            if self._files.get(name) != self.path / shard:
                raise ConfigError(
                    f"{self.path / INDEX}: {name} should be in {shard}, which lacks it; download the model again"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors in the files."""
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, from the header."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """Number type of tensor `name` as safetensors calls it (`BF16`, `F32`, ...), from the header."""
        return self._dtypes[name]

    def get(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Tensor `name`, or these of its elements, on the CPU, mapped from the file: its pages are read when used, and
        let go with the tensor."""
        # opened anew for each tensor: one mapping for all would hold every page read so far
        with _open(self._files[name]) as file:
            whole = part is None or part == tuple(slice(0, n) for n in self._shapes[name])
            return file.get_tensor(name) if whole else file.get_slice(name)[part]

    def _read_header(self, file: Path, index: Mapping[str, str]) -> None:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                if index.get(name, file.name) != file.name:
                    continue  # a second copy: the index says which one counts
                header = opened.get_slice(name)
                self._files[name] = file
                self._shapes[name] = tuple(header.get_shape())
                self._dtypes[name] = header.get_dtype()


def _read_index(path: Path) -> dict[str, str] | None:
    """{tensor: shard file name}, or None where one file holds all."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; a model is a directory in Hugging Face's format")
    if (path / WEIGHTS).is_file():
        return None
    file = path / INDEX
    if not file.is_file():
        pickles = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt*"))
        if pickles:
            raise ConfigError(
                f"{path}: the weights are pickles ({pickles[0].name}), which can run code when opened; "
                "convert them to safetensors"
            )
        raise ConfigError(f"{path}: no weights there; expected {WEIGHTS} or {INDEX} with its shards")
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        named = all(isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a readable index ({error!r}); download it again") from None
    if not weight_map or not named:
        raise ConfigError(f"{file}: weight_map must map each tensor to the name of a file beside the index")
    return weight_map


def _open(file: Path) -> safe_open:
    """`file`, opened and its header checked against its size."""
    if not file.is_file():
        raise ConfigError(f"{file}: this file of the weights is missing; download or copy it again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cut off or damaged ({error}); download or copy it again") from None


def check_tensors(checkpoint: Checkpoint, table: tuple[Unit, ...], tied: bool) -> None:
    """Raise ConfigError unless `checkpoint` holds exactly the tensors of `table`, in their shapes, as plain floats.

    Rotary frequencies that old files keep are ignored; so is a tied model's `lm_head.weight` (`tied`) if it equals the
    embedding bit for bit: a different one would be dropped, and the model would not be the one that was trained.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names if not name.endswith(".rotary_emb.inv_freq")}
    spare_head = tied and shapes.pop(LM_HEAD, None) is not None
    compare_tensors(shapes, table, str(checkpoint.path))
    odd = [f"{name} is {checkpoint.dtype(name)}" for name in shapes if checkpoint.dtype(name) not in STORED_AS.values()]
    if odd:
        raise ConfigError(
            f"{checkpoint.path}: weights must be plain floats ({', '.join(STORED_AS.values())}), but {_some(odd)}; "
            "use the model's original weights"
        )
    if spare_head and not _same_bits(checkpoint.get(EMBEDDING), checkpoint.get(LM_HEAD)):
        raise ConfigError(
            f"{checkpoint.path}: config.json ties the LM head to the embedding, but the files hold a {LM_HEAD} that "
            "differs from it; set tie_word_embeddings to false, or remove the tensor"
        )


def compare_tensors(found: Mapping[str, tuple[int, ...]], table: tuple[Unit, ...], where: str) -> None:
    """Raise ConfigError, naming them, for tensors of `table` that `found` lacks, has besides, or has in other shapes.

    `found` is {Hugging Face name: shape}; `where` begins the message.
    """
    expected = {
        part.hf_name: (part.stop - part.start, *spec.shape[1:])
        for unit in table
        for spec in unit.tensors
        for part in spec.parts
    }
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    shapes = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    kinds = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    faults = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise ConfigError(f"{where}: the tensors do not fit the configuration; {'; '.join(faults)}")


def _some(names: Collection[str]) -> str:
    """The first few of `names` and the number of the others."""
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write_model(
    directory: str | Path,
    config: ModelConfig,
    tensors: Iterable[Source],
    *,
    dtype: torch.dtype,
    tokenizer_from: Path | None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a Hugging Face directory: config.json, generation_config.json, weights as `dtype`, and a tokenizer.

    `tensors` are all checkpoint tensors of `config`'s table and no others (a tied model has no LM head); each call is
    made once, in order, and its tensor is let go before the next. One tensor may exceed `max_shard_bytes`. Tokenizer
    and generation_config.json are copied from `tokenizer_from` where it has them. The directory appears whole or not at
    all, once it has been read back. Raises ConfigError for a directory that is not empty, unless `overwrite` replaces
    it, and as check_written does.
    """
    sources = list(tensors)
    compare_tensors({name: tuple(shape) for name, shape, _, _ in sources}, parameter_table(config), "export")
    if dtype not in STORED_AS:
        raise ConfigError(f"weights cannot be written as {dtype}; use one of {', '.join(map(str, STORED_AS))}")
    if tokenizer_from is not None and not tokenizer_from.is_dir():
        raise ConfigError(f"{tokenizer_from}: no such directory to copy the tokenizer from")
    with whole_directory(Path(directory).resolve(), overwrite) as new:
        written = _write_weights(new, sources, dtype, max_shard_bytes)
        check_written(Checkpoint(new), parameter_table(config), written)
        write_json(new / "config.json", config.to_dict(str(dtype).removeprefix("torch.")))
        copied = copy_files(tokenizer_from, new, (*TOKENIZER_FILES, "generation_config.json"))
        if "generation_config.json" not in copied:
            keys = ("bos_token_id", "eos_token_id", "pad_token_id")
            ids = {key: config.extra[key] for key in keys if config.extra.get(key) is not None}
            write_json(new / "generation_config.json", {"_from_model_config": True, **ids})


def check_written(checkpoint: Checkpoint, table: tuple[Unit, ...], written: Mapping[str, Extremes]) -> None:
    """Read back the files of `table`'s tensors, which were just written: every one is there, with its shape, its values
    lie between the extremes of what was `written`, and all are finite.

    Raises OSError, which names the tensor, where the files are not what was written, and ConfigError for values that
    nobody can use.
    """
    compare_tensors({name: checkpoint.shape(name) for name in checkpoint.names}, table, str(checkpoint.path))
    for name, expected in written.items():
        found = extremes(checkpoint.get(name))
        if not all(map(math.isfinite, expected)):
            raise ConfigError(
                f"weights to be written must be finite; {name} has values that are infinite or NaN; "
                "go back to a checkpoint from before"
            )
        if found != expected:
            raise OSError(
                f"{checkpoint.path}: {name} reads back with values from {found[0]:g} to {found[1]:g}, but those "
                f"written are from {expected[0]:g} to {expected[1]:g}; is the disk full or damaged?"
            )


def extremes(values: torch.Tensor) -> Extremes:
    """The least and the greatest of `values`; NaN where one is."""
    least, most = torch.aminmax(values)
    return least.item(), most.item()


def _write_weights(
    directory: Path, sources: list[Source], dtype: torch.dtype, max_shard_bytes: int
) -> dict[str, Extremes]:
    """Returns what the values of every tensor lie between."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, _, _ in sources]
    shards: list[list[Source]] = [[]]
    filled = 0
    for source, size in zip(sources, sizes, strict=True):
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += size
    if len(shards) == 1:
        return _write_safetensors(directory / WEIGHTS, sources, dtype)
    weight_map, written = {}, {}
    for number, shard in enumerate(shards, 1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written |= _write_safetensors(file, shard, dtype)
        weight_map.update({name: file.name for name, *_ in shard})
    write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})
    return written


def _write_safetensors(file: Path, sources: list[Source], dtype: torch.dtype) -> dict[str, Extremes]:
    """One safetensors file: header length (8 bytes, little-endian), JSON header padded to 8, the tensors' bytes.

    The library's own writer takes all tensors at once; this one takes them one by one.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _, _ in sources:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": STORED_AS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        return {source[0]: _write_tensor(out, source, dtype) for source in sources}


def _write_tensor(out: BinaryIO, source: Source, dtype: torch.dtype) -> Extremes:
    # a function of its own, so that nothing of this tensor (a piece is a view of it) is left when the next is made
    name, shape, source_dtype, load = source
    tensor = load()
    assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == source_dtype, name
    found = []
    for piece in tensor.detach().reshape(-1).split(_PIECE):
        plain = piece.to(device="cpu", dtype=dtype)
        out.write(plain.view(torch.uint8).numpy().data)
        found += extremes(plain)
    return extremes(torch.tensor(found, dtype=torch.float64))


def copy_files(source: Path | None, target: Path, names: Iterable[str]) -> set[str]:
    """Copy those of the files `names` that `source` has; returns the names of what was copied."""
    copied = set()
    for name in names:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, target / name)
            copied.add(name)
    return copied
