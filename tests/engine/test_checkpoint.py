"""Checkpoints over ranks: any number of them, sharing out anything, reads exactly what any other has written."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from fullstride import ModelConfig, Options
from fullstride.engine.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, steps
from fullstride.engine.state import Sharing, State
from fullstride.parallel.comm import Communicator
from tests.ranks import RankTrainer, together

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the processes

# its units have 1, 6, 31 and more steps of 256 elements: four ranks leave one or three of them without any
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=31,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)
METHODS = {
    "full": {"dtype": "bf16", "master_dtype": "fp32", "v_dtype": "bf16"},
    "lora": {"method": "lora", "lora_rank": 2, "dtype": "fp32"},
}
Whole = dict[str, torch.Tensor]


def make(comm: Communicator, zero: int, method: str) -> RankTrainer:
    options = Options(device="cpu", **METHODS[method])  # type: ignore[arg-type]
    return RankTrainer(comm, CONFIG, options, 1, 8, 1, sharing=Sharing(zero))


def fill(state: State) -> Whole:
    """Other numbers in every element; each rank sets its own. Returns all ranks' buffers, whole."""
    whole = {}
    for i, unit in enumerate(state.trained):
        for j, (name, part) in enumerate(state.held(unit).items()):
            generator = torch.Generator().manual_seed(100 * i + j)
            values = torch.randn(part.size, generator=generator).to(part.values.dtype)
            part.values.copy_(values[part.first : part.first + part.values.numel()])
            whole[f"{unit}.{name}"] = values
    return whole


def check_held(state: State, whole: Whole) -> None:
    """Assert that this rank holds its parts of `whole`, and zeros behind them."""
    assert {f"{u}.{name}" for u in state.trained for name in state.held(u)} == set(whole)
    for unit, trained in state.trained.items():
        for name, part in state.held(unit).items():
            expected = whole[f"{unit}.{name}"][part.first : part.first + part.values.numel()]
            assert torch.equal(part.values, expected), (unit, name)
            buffer = getattr(trained, name)
            assert not buffer[part.values.numel() :].any()


def save(comm: Communicator, zero: int, method: str, directory: Path) -> None:
    trainer = make(comm, zero, method)
    fill(trainer.engine.state)
    assert save_checkpoint(trainer.engine, directory, 3, {"from": comm.size}) is None


def load(comm: Communicator, zero: int, method: str, directory: Path) -> None:
    trainer, other = make(comm, zero, method), make(Communicator(), 0, method)
    whole = fill(other.engine.state)
    assert load_checkpoint(trainer.engine, directory)["from"] >= 1
    state = trainer.engine.state
    check_held(state, whole)
    assert trainer.engine.updates == 3
    for unit in state.trained:  # also where weights are whole on every rank, or are gathered
        spec = next(u for u in state.units if u.name == unit)
        with state.open(spec) as views:
            for name, expected in state.trained[unit].layout.views(whole[f"{unit}.param"]).items():
                assert torch.equal(views[name], expected), name


SPLITS = [(1, 1), (2, 0), (2, 1), (2, 3), (4, 2), (4, 3)]  # ranks and ZeRO levels


@pytest.mark.parametrize("splits", [[(1, 1), (2, 3)], pytest.param(SPLITS, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("method", METHODS)
def test_any_ranks_read_what_any_ranks_wrote(method: str, splits: list[tuple[int, int]], tmp_path: Path) -> None:
    for ranks, zero in splits:
        together(ranks, save, zero, method, tmp_path / f"{ranks}{zero}")
    for (ranks, zero), written in itertools.product(splits, splits):
        together(ranks, load, zero, method, tmp_path / f"{written[0]}{written[1]}")


def test_every_rank_writes_a_part_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    """What ranks share out while they train makes no difference to the files."""
    for zero in (0, 3):
        together(2, save, zero, "full", tmp_path / f"{zero}")
        folder = tmp_path / f"{zero}" / "step_00000003"
        files = sorted(folder.iterdir())
        record = json.loads((folder / "state.json").read_text())
        assert {f.name: f.stat().st_size for f in files if f.suffix == ".safetensors"} == record["files"]
        assert [f.name for f in files if f.suffix != ".safetensors"] == ["state.json"]
        # embedding, two blocks, head: the last has one step of 256 elements, so the second rank has none of it
        assert [f.name[:23] for f in files[:-1]] == [
            f"shard-0000{rank}-model-0000{unit}" for rank in (1, 2) for unit in (1, 2, 3, 4)[: 5 - rank]
        ]
    for file in (tmp_path / "0" / "step_00000003").glob("*.safetensors"):
        other = load_file(folder / file.name)
        assert other and all(torch.equal(other[key], value) for key, value in load_file(file).items())
    whole = fill(make(Communicator(), 0, "full").engine.state)
    first, second = (load_file(folder / f"shard-0000{rank}-model-00002-of-00004.safetensors") for rank in (1, 2))
    for name in ("param", "master", "m", "v"):
        key = f"blocks.0.{name}"
        assert torch.equal(torch.cat([first[key], second[key]]), whole[key])
    with safe_open(files[0], framework="pt") as opened:
        assert json.loads(opened.metadata()["DCP_SHARDING_INFO"])["embedding.m"] == {"saved_offsets": [0]}


def test_torch_reads_it_by_itself(tmp_path: Path) -> None:
    """torch.distributed.checkpoint.load, in one process, into plain tensors."""
    together(4, save, 3, "full", tmp_path)
    whole = fill(make(Communicator(), 0, "full").engine.state)
    read = {key: torch.zeros_like(value) for key, value in whole.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "step_00000003"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that it takes this for one process
        dcp.load(read, storage_reader=reader, no_dist=True)
    for key, value in whole.items():
        assert torch.equal(read[key], value), key


def refuse_on_one(comm: Communicator, directory: Path, rank: int) -> str:
    """Save where `rank` cannot write; what it says."""
    trainer = make(comm, 1, "full")
    whole = fill(make(Communicator(), 0, "full").engine.state)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == rank:
            patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        try:
            save_checkpoint(trainer.engine, directory, 4, {})
            told = ""
        except OSError as error:
            told = str(error)
    assert load_checkpoint(trainer.engine, directory) == {"from": 2}
    check_held(trainer.engine.state, whole)
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write(rank: int, tmp_path: Path) -> None:
    """The first one speaks for all; nothing is left, and what was there is as it was."""
    together(2, save, 1, "full", tmp_path)
    told = together(2, refuse_on_one, tmp_path, rank)
    assert f"rank {rank} could not write: [Errno 28] No space left on device" in told[0] and told[1] == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]


def elsewhere(comm: Communicator, directories: list[Path]) -> str:
    try:
        save_checkpoint(make(comm, 1, "full").engine, directories[comm.rank], 3, {})
    except OSError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_see_one_directory(tmp_path: Path) -> None:
    """As on two machines without a common file system."""
    places = [tmp_path / "a", tmp_path / "b"]
    first, second = together(2, elsewhere, places)
    assert "must be on a file system that all ranks share" in first and second == ""
    assert not list(places[0].iterdir())


def test_foreign_folders_are_no_steps(tmp_path: Path) -> None:
    save(Communicator(), 1, "full", tmp_path)
    for name in ("step_00000003_backup", "step_3", "step_x", "step_\u0663"):
        shutil.copytree(tmp_path / "step_00000003", tmp_path / name)
    assert steps(tmp_path) == [3]
    assert find_checkpoint(tmp_path).name == "step_00000003"
