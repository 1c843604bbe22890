"""Running out of memory: what the message says, and that the setting which it names fits when it is followed."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullstride import ConfigError, ModelConfig, Options, OutOfMemory, Trainer
from fullstride.config.keys import parse
from fullstride.config.training import FinetuneConfig
from fullstride.engine.plan import LIBRARIES, predict
from fullstride.memory import arena
from fullstride.model.presets import preset
from fullstride.trainer.remedy import candidates, remedy
from fullstride.trainer.setting import Setting
from tests.engine.test_plan import train

# activations outweigh the weights, as at the sizes where memory is short; and a model that is nothing but weights
ACTIVE = ModelConfig("qwen3", 300, 32, 128, 6, 4, 2, head_dim=8, tie_word_embeddings=True)
HEAVY = ModelConfig("llama", 400, 256, 512, 4, 8, 8, head_dim=32)
BATCH, SEQ_LEN = 4, 256


def limit_memory(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(arena, "_physical_memory", lambda: int(size))


def options_of(**more: Any) -> Options:
    return Options(**{"device": "cpu", "dtype": "fp32", **more}).resolved()


def make(config: ModelConfig, options: Options, batch_size=BATCH, seq_len=SEQ_LEN, grad_accum=1) -> Trainer:
    trainer = Trainer(config, options, batch_size=batch_size, seq_len=seq_len, grad_accum=grad_accum)
    trainer.init_weights()
    return trainer


def plan_of(config: ModelConfig, options: Options, batch_size: int = BATCH, seq_len: int = SEQ_LEN) -> dict[str, int]:
    return predict(config, *Setting(options, batch_size, seq_len, 1).engine(config), options.device).device


def named(message: str) -> dict[str, str]:
    """The flags that the message says would fit."""
    found = re.search(r"; ((?:--[\w-]+ \S+ )+)would fit: about ([\d.]+ [GMk]B) of ([\d.]+ [GMk]B)$", message)
    assert found, message
    words = found[1].split()
    return dict(zip(words[::2], words[1::2], strict=True))


def follow(flags: dict[str, str], config: ModelConfig, options: Options, batch_size: int, seq_len: int) -> Trainer:
    """Make a trainer with the setting that failed and `flags` on top, both as the command line reads them."""
    argv = {"--model": "m", "--data": "d", "--method": options.method, "--device": options.device}
    argv |= {"--dtype": options.dtype, "--batch-size": str(batch_size), "--seq-len": str(seq_len), "--grad-accum": "1"}
    chosen = parse(FinetuneConfig, [word for pair in (argv | flags).items() for word in pair])
    assert chosen.batch_size * chosen.grad_accum == batch_size  # the update is what it was
    return make(config, chosen.options(), chosen.batch_size, chosen.seq_len, chosen.grad_accum)


def test_the_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, 9.9e6)
    with pytest.raises(OutOfMemory) as error:
        make(ACTIVE, options_of())
    found = re.match(
        r"out of memory on cpu: segment 'activations' asks for ([\d.]+) MB, ([\d.]+) kB are free, ([\d.]+) MB are "
        r"missing; held are ([\d.]+) MB \((.*?)\); the run needs about ([\d.]+) MB; --batch-size \d",
        str(error.value),
    )
    assert found, str(error.value)
    asked, free, missing, held, whole = (float(found[i]) for i in (1, 2, 3, 4, 6))
    # all rounded to 0.01 MB
    assert asked == pytest.approx(free / 1e3 + missing, abs=0.02)
    assert held == pytest.approx(9.9 - free / 1e3, abs=0.02)
    assert {"weights", "gradients", "moments", "activations"} <= set(re.findall(r"(\w+) [\d.]+ [MkG]B", found[5]))
    assert whole == pytest.approx(sum(plan_of(ACTIVE, options_of()).values()) / 1e6, abs=0.01)


@pytest.mark.parametrize("config", [ACTIVE, HEAVY], ids=["activations", "weights"])
def test_the_named_setting_fits(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one limit after another, the setting named is followed, and trains under the same limit."""
    options, seq_len = options_of(), SEQ_LEN if config is ACTIVE else 128
    plan = plan_of(config, options, seq_len=seq_len)
    arenas = sum(plan.values()) - plan[LIBRARIES]
    seen: set[tuple[str, str]] = set()
    for share in (0.99, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15):
        limit_memory(monkeypatch, share * arenas)
        with pytest.raises(OutOfMemory, match=r"segment '\w+' asks for") as error:
            train(make(config, options, seq_len=seq_len))
        if "nothing that trains the same fits" in str(error.value) and "would fit" not in str(error.value):
            continue
        flags = named(str(error.value))
        with follow(flags, config, options, BATCH, seq_len) as trainer:
            train(trainer, updates=2)
            assert sum(trainer.engine.arena.segments.values()) <= share * arenas
        seen |= flags.items()
    told = {key for key, _ in seen}
    if config is ACTIVE:
        assert {"--batch-size", "--grad-accum", "--recompute", "--seq-len"} <= told and "--method" not in told
    else:
        assert ("--method", "lora") in seen and "--seq-len" not in told  # 128 is the shortest that is proposed


def test_ranks_share_more_before_rows_are_cut() -> None:
    """Two ranks with ZeRO 3 fit where nothing else that trains the same does."""
    deep = dataclasses.replace(HEAVY, num_hidden_layers=16)
    setting, shared = (Setting(options_of(dp=2, zero=zero), 1, 128, 1) for zero in (1, 3))
    need = sum(predict(deep, *shared.engine(deep), "cpu", ranks=2).device.values())
    capacity = int(need / 0.95) + 1  # a twentieth is free
    told = remedy(deep, setting, "cpu", capacity, 0, 0, 1)
    assert re.search(r"\d [MG]B; --zero 3 would fit", told)
    alone = remedy(deep, Setting(options_of(), 1, 128, 1), "cpu", capacity, 0, 0, 1)
    assert "--zero" not in alone


def test_the_order_of_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What harms less comes first: at the limit of each, the one named is the first that fits."""
    options = options_of()

    def need(batch_size: int, seq_len: int = SEQ_LEN, **more: Any) -> int:
        return sum(plan_of(ACTIVE, options_of(**more), batch_size, seq_len).values())

    def name(bytes_needed: int, chosen: Options = options, batch_size: int = BATCH) -> dict[str, str]:
        limit_memory(monkeypatch, bytes_needed / 0.95 + 1)  # a twentieth is kept free
        with pytest.raises(OutOfMemory) as error:
            make(ACTIVE, chosen, batch_size)
        return named(str(error.value))

    one = {"--batch-size": "1", "--grad-accum": "4"}
    assert name(need(2)) == {"--batch-size": "2", "--grad-accum": "2"}
    assert name(need(1)) == one
    assert name(need(1, head_chunks=16)) == one | {"--head-chunks": "16"}
    assert name(need(1, recompute="swiglu,norm")) == one | {"--recompute": "swiglu,norm"}
    assert name(need(1, recompute="block")) == one | {"--recompute": "block"}
    shorter = one | {"--recompute": "block", "--seq-len": "128"}
    assert name(need(1, 128, recompute="block")) == shorter
    # flags that were given stay, and the update stays where batch-size has other divisors than powers of two
    kept = one | {"--recompute": "swiglu,norm,qkv"}
    assert name(need(1, recompute="qkv,swiglu,norm"), options_of(recompute="qkv")) == kept
    assert name(need(3), batch_size=9) == {"--batch-size": "3", "--grad-accum": "3"}


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, 1e6)
    with pytest.raises(OutOfMemory) as error:
        make(ACTIVE, options_of())
    least = sum(plan_of(ACTIVE, options_of(recompute="block", head_chunks=16), 1, 128).values()) / 1e6
    flags = "--batch-size 1 --grad-accum 4 --head-chunks 16 --recompute block --seq-len 128"
    assert str(error.value).endswith(
        f"; nothing that trains the same fits 1.00 MB: {flags} needs about {least:.2f} MB; "
        "take a smaller model or a larger device"
    )
    with pytest.raises(OutOfMemory, match="would fit") as error:
        limit_memory(monkeypatch, 30e6)
        make(HEAVY, options_of(), seq_len=128)
    assert "nothing that trains the same fits 30.00 MB" in str(error.value)
    assert named(str(error.value))["--method"] == "lora"
    # what is as small as it gets
    with pytest.raises(OutOfMemory, match=r"nothing that trains the same fits 1.00 MB; take a smaller model"):
        limit_memory(monkeypatch, 1e6)
        make(HEAVY, options_of(method="lora", recompute="block", head_chunks=1), batch_size=1, seq_len=1)


def told_on_a_gpu(room: float, host: float, **more: Any) -> str:
    """What a run of a 1.5B model is told. room: the GPU's memory, in what the run needs there with gradients in host
    memory; host: host memory, in what those take."""
    dtypes = dict.fromkeys(("dtype", "matmul", "grad_dtype", "master_dtype", "m_dtype", "v_dtype"), "bf16")
    options = Options(**{"device": "cuda", "attention": "torch", "dp": 1, **dtypes, **more})
    config, setting = preset("qwen2.5-1.5b"), Setting(options, 1, 1024, 1)
    away = replace(setting, options=replace(options, offload=("grads",), zero=2))
    plan = predict(config, *away.engine(config), ranks=options.dp)
    pinned = options.dp * sum(plan.pinned.values())
    return remedy(config, setting, "cuda", int(room * sum(plan.device.values())), int(host * pinned), 0, 1)


def test_gradients_go_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they fit there, and may be there: before recompute, and back where it is the host that lacks memory."""
    monkeypatch.setattr(
        "fullstride.config.resolve_device", lambda device: device
    )  # a GPU, as far as remedies are concerned
    assert "; --offload grads would fit: about" in told_on_a_gpu(1.06, 1.01)
    assert "--offload" not in told_on_a_gpu(1.06, 0.99)
    assert "; --offload grads would fit: about" in told_on_a_gpu(1.06, 1.01, dp=2, zero=2)
    assert "--offload" not in told_on_a_gpu(1.06, 0.99, dp=2, zero=2)
    assert "--zero 3 --offload grads" in told_on_a_gpu(0.6, 1.01, dp=2, zero=1)
    back = told_on_a_gpu(10, 0.99, offload=("grads",))
    assert back.startswith("the run needs more than this machine has; --offload '' would fit")
    assert parse(FinetuneConfig, ["--model", "m", "--data", "d", "--offload", ""]).offload == ()


def test_a_cpu_has_no_other_memory() -> None:
    """Gradients elsewhere in the same memory are not proposed; those that are elsewhere come back."""
    setting = Setting(options_of(), BATCH, SEQ_LEN, 1)
    offers = {s.options.offload for group in candidates(ACTIVE, setting) for s in group}
    assert offers == {()}
    away = replace(setting, options=options_of(offload=("grads",)))
    assert {s.options.offload for group in candidates(ACTIVE, away) for s in group} == {(), ("grads",)}


def torch_fails(monkeypatch: pytest.MonkeyPatch, target: str, error: Exception) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(target, fails)


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8 GiB")
ASYNC = torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)\nRequested : 2 MiB")


@pytest.mark.parametrize(("raised", "asked"), [(CUDA, "1.61 GB"), (ASYNC, "2.10 MB")], ids=["native", "async"])
@pytest.mark.parametrize("call", ["step", "validate", "update"])
def test_what_libraries_allocate(call: str, raised: Exception, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error from outside of the arena gets the same message; step and update stop the trainer."""
    trainer = make(ACTIVE, options_of(), batch_size=4, seq_len=64)
    ids = torch.zeros(4, 64, dtype=torch.int32).numpy()
    target = {"update": "fullstride.engine.optimizer.adamw"}.get(call, "fullstride.engine.stage.attention_fwd")
    if call == "update":
        trainer.step(ids, ids)
    torch_fails(monkeypatch, target, raised)
    limit_memory(monkeypatch, 1e9)
    calls = {
        "step": lambda: trainer.step(ids, ids),
        "validate": lambda: trainer.validate(ids, ids),
        "update": lambda: trainer.update(lr=1e-3),
    }
    with pytest.raises(OutOfMemory) as error:
        calls[call]()
    assert f"segment 'libraries' asks for {asked}, " in str(error.value)
    assert "held are" in str(error.value) and "weights" in str(error.value)
    assert error.value.__cause__ is raised
    assert named(str(error.value)) == {"--batch-size": "2", "--grad-accum": "2"}
    monkeypatch.undo()
    if call == "validate":
        assert trainer.validate(ids, ids)["tokens"] == 256
    else:
        with pytest.raises(ConfigError, match="the trainer is stopped"):
            trainer.step(ids, ids)


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(ACTIVE, options_of(), batch_size=1, seq_len=16)
    ids = torch.zeros(1, 16, dtype=torch.int32).numpy()
    raised = RuntimeError("CUDA error: an illegal memory access was encountered")
    torch_fails(monkeypatch, "fullstride.engine.stage.attention_fwd", raised)
    with pytest.raises(RuntimeError) as error:
        trainer.step(ids, ids)
    assert error.value is raised


# ---- on a GPU

GPU_SIZES = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
ON_GPU = ModelConfig(
    "qwen3", **GPU_SIZES, num_attention_heads=16, num_key_value_heads=4, head_dim=128, tie_word_embeddings=True
)


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    """Afterwards no limit, and nothing cached, is left to other tests."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["construction", "step"])
def test_the_named_setting_fits_on_a_gpu(place: str, whole_gpu: None) -> None:
    """Under torch's limit for this process: too little for the engine's buffers, and enough for those but not for what
    attention keeps. The setting named then trains, with graphs, under the same limit."""
    options, batch_size, seq_len = Options(device="cuda").resolved(), 16, 1024
    plan = plan_of(ON_GPU, options, batch_size, seq_len)
    buffers = sum(plan.values()) - plan[LIBRARIES]
    kept = 24 * batch_size * seq_len * 16 * 128 * 2  # attention's outputs of all layers; the scratch comes before most
    limit = 0.6 * buffers if place == "construction" else buffers + 0.4 * kept
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((limit + torch.cuda.memory_reserved()) / total)
    message = ""
    try:
        trainer = make(ON_GPU, options, batch_size, seq_len)
        assert place == "step", "the engine was to be refused"
        train(trainer)
    except OutOfMemory as error:
        message = str(error)
    print(f"\n{message}")
    assert f"segment '{'activations' if place == 'construction' else LIBRARIES}' asks for" in message
    assert "are missing" in message or "not in one piece" in message
    gc.collect()
    torch.cuda.empty_cache()
    with follow(named(message), ON_GPU, options, batch_size, seq_len) as trainer:
        train(trainer, updates=4)
        print(f"followed: {torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved of {limit / 1e9:.2f} GB")
