"""Sizes that kernels cannot take are refused with the nearest that works; all others train, on a GPU too."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride import ConfigError, ModelConfig, Options, Trainer
from fullstride.engine.batch import MOST_PLACES, document_places
from fullstride.engine.limits import MOST_TOKENS, MOST_WIDTH, check_documents, check_sizes
from tests.parity.harness import CONFIG

# nothing but the head size is a multiple of anything
ODD = ModelConfig("qwen3", 997, 77, 101, 2, 3, 1, head_dim=8, initializer_range=0.1)


def test_odd_sizes_are_taken() -> None:
    for device in ("cuda", "cpu"):
        check_sizes(ODD, 3, 13, device)
        check_sizes(ODD, 1, 1, device)
    check_sizes(CONFIG, MOST_PLACES, 2, "cuda")
    check_sizes(CONFIG, 1, MOST_TOKENS, "cuda")


def test_sizes_that_kernels_lack_are_refused() -> None:
    for device in ("cuda", "cpu"):
        rule = r"at most 2,147,483,647 tokens .*got 65,536 rows of 32,768; set batch-size to at most 65,535"
        with pytest.raises(ConfigError, match=rule):
            check_sizes(CONFIG, 2**16, 2**15, device)
        with pytest.raises(ConfigError, match=r"got 1 rows of 2,147,483,648; set seq-len to at most 2,147,483,647"):
            check_sizes(CONFIG, 1, 2**31, device)
    with pytest.raises(ConfigError, match=r"at most 65,535 rows .*got 65,536; set batch-size to at most 65,535, and"):
        check_sizes(CONFIG, 2**16, 2, "cuda")
    check_sizes(CONFIG, 2**16, 2, "cpu")
    wide = ModelConfig("llama", 61, MOST_WIDTH + 8, 56, 1, 4, 2, head_dim=16)
    with pytest.raises(
        ConfigError, match=r"at most 65,536 columns, this model has hidden_size 65,544; train it on the"
    ):
        check_sizes(wide, 1, 2, "cuda")
    check_sizes(wide, 1, 2, "cpu")
    for head_dim in (12, 264):
        narrow = ModelConfig("llama", 61, 40, 56, 1, 4, 2, head_dim=head_dim)
        with pytest.raises(ConfigError, match=rf"head_dim to be a multiple of 8, at most 256; .*head_dim={head_dim}"):
            check_sizes(narrow, 1, 2, "cuda")
        check_sizes(narrow, 1, 2, "cpu")


def test_documents_that_attention_lacks_are_refused() -> None:
    check_documents(65_535, "cuda")
    check_documents(10**6, "cpu")
    with pytest.raises(ConfigError, match=r"at most 65,535 documents .*got 65,536; lower batch-size"):
        check_documents(65_536, "cuda")


def test_places_for_documents() -> None:
    """Steps of four from four a row; never more than tokens, nor than a launch takes, unless there are."""
    assert [document_places(n, 2, 1000) for n in (3, 8, 9, 32, 33, 129, 1000)] == [8, 8, 32, 32, 128, 512, 1000]
    assert document_places(5, 1, 6) == 6
    assert document_places(40_000, 64, 10**6) == MOST_PLACES
    assert document_places(70_000, 64, 10**6) == 70_000  # on a CPU


def test_the_trainer_refuses_such_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set batch-size to at most 1,048,575"):
        Trainer(CONFIG, Options(device="cpu"), batch_size=2**20, seq_len=2**11)
    trainer = Trainer(CONFIG, Options(device="cpu"), batch_size=1, seq_len=4)
    trainer.init_weights()
    ids = np.zeros((1, 4), dtype=np.int32)
    monkeypatch.setattr("fullstride.engine.limits.MOST_PLACES", 1)
    trainer.device = torch.device("cuda")  # what the rule is for; the engine stays where it is
    with pytest.raises(ConfigError, match="documents a packed micro-step, got 2"):
        trainer.step(ids, ids, np.array([[0, 0, 1, 1]], dtype=np.int32))


# ---- on a GPU


def batch(rows: int, seq_len: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = np.random.default_rng(0).integers(vocabulary, size=(2, rows, seq_len), dtype=np.int32)
    return inputs, targets


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("seq_len", [1, 2, 13, 65])
def test_odd_sizes_train_as_on_a_cpu(seq_len: int, method: str, tmp_path: Path) -> None:
    with Trainer(ODD, Options(device="cpu"), batch_size=1, seq_len=2) as trainer:
        trainer.init_weights()
        trainer.export_model(tmp_path)
    lora = {"method": "lora", "lora_rank": 3, "lora_alpha": 6.0} if method == "lora" else {}
    told = {}
    for device, dtype in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        options = Options(device=device, dtype=dtype, **lora)
        with Trainer.from_pretrained(tmp_path, options, batch_size=3, seq_len=seq_len, grad_accum=2) as trainer:
            updates = []
            for _ in range(4):  # eager, captured, replayed
                for _ in range(2):
                    trainer.step(*batch(3, seq_len, ODD.vocab_size))
                # an eps so large that a step is in proportion to the gradient
                metrics = trainer.update(lr=0.02, eps=1.0)
                updates.append([metrics["loss"], metrics["grad_norm"]])
            told[device, dtype] = updates
    if method == "lora":  # adapters start at random, and every device draws its own: the first loss is the base's
        told = {key: updates[0][:1] for key, updates in told.items()}
    # other exponentials and orders of sums; bf16 has 8 bits, and some ten roundings of 0.4 % follow one another
    np.testing.assert_allclose(told["cuda", "fp32"], told["cpu", "fp32"], rtol=2e-4)
    np.testing.assert_allclose(told["cuda", "bf16"], told["cpu", "fp32"], rtol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_most_documents_train(packed: bool, dtype: str) -> None:
    """65,535 rows of two tokens; 32,768 documents of two tokens, which get 65,535 places."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    rows, seq_len = (64, 1024) if packed else (MOST_PLACES, 2)
    documents = np.broadcast_to(np.arange(seq_len, dtype=np.int32) // 2, (rows, seq_len)).copy() if packed else None
    with Trainer(config, Options(device="cuda", dtype=dtype), batch_size=rows, seq_len=seq_len) as trainer:
        trainer.init_weights()
        for _ in range(3):
            trainer.step(*batch(rows, seq_len, config.vocab_size), documents)
            told = trainer.update(lr=1e-3)
    assert told["loss"] == pytest.approx(math.log(config.vocab_size), rel=0.5)
    assert 0 < told["grad_norm"] < math.inf


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_widest_norm(dtype: torch.dtype) -> None:
    from fullstride.ops.rms_norm import rms_norm_bwd, rms_norm_bwd_ref, rms_norm_fwd, rms_norm_fwd_ref
    from tests.kernels.place import Place, assert_close, high

    place = Place(torch.device("cuda"), dtype)
    x, weight, dnormed = place.randn(8, MOST_WIDTH), place.randn(MOST_WIDTH), place.randn(8, MOST_WIDTH)
    normed, dx = place.poisoned(8, MOST_WIDTH), place.poisoned(8, MOST_WIDTH)
    rstd, dweight = place.poisoned(8, dtype=torch.float32), torch.zeros_like(weight)
    rms_norm_fwd(x, None, weight, 1e-6, x, normed, rstd)
    rms_norm_bwd(dnormed, x, weight, rstd, None, dx, dweight)
    assert_close(normed, rms_norm_fwd_ref(high(x), high(weight), 1e-6)[0])
    for actual, expected in zip(
        (dx, dweight), rms_norm_bwd_ref(high(dnormed), high(x), high(weight), high(rstd)), strict=True
    ):
        assert_close(actual, expected)
