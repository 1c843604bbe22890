"""Keys: types, values, contradictions, what does not work yet, TOML and flags."""

from __future__ import annotations

import dataclasses
import re
import typing
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from fullstride.config import DTYPES, FLASH4_VERSION, LORA_TARGETS, Options, resolve_attention
from fullstride.config.commands import BenchConfig, GenerateConfig, PlanConfig
from fullstride.config.keys import BOUNDS, build, dump_toml, help_text, parse
from fullstride.config.training import FinetuneConfig
from fullstride.data.chat import Truncate
from fullstride.data.render import Supervise, Thinking
from fullstride.engine.lr import SCHEDULES
from fullstride.errors import ConfigError, UsageError
from fullstride.model.lora import PROJECTIONS
from fullstride.trainer import trainer

RUN = {"model": "m", "data": "d.jsonl"}


def finetune(**keys: object) -> FinetuneConfig:
    return build(FinetuneConfig, RUN | keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_dropout": 1.0}, r"lora-dropout must be below 1, got 1\.0"),
        ({"lora_dropout": -0.1}, r"lora-dropout must be at least 0"),
        ({"lora_rank": 0}, r"lora-rank must be at least 1, got 0"),
        ({"lora_alpha": 0}, r"lora-alpha must be above 0, got 0\.0; leave it out for 32\.0"),
        ({"lora_targets": "q_prj"}, r"lora-targets .*'q_prj' \(nearest: q_proj\)"),
        ({"lora_targets": ""}, r"lora-targets must name at least one"),
        ({"recompute": "ffn,ffn"}, r"recompute names one thing twice"),
        ({"recompute": "attn"}, r"'attn' \(nearest: att\)"),
        ({"method": "lore"}, r"method must be one of full, lora; got 'lore' \(nearest: lora\)"),
        ({"method": "full", "lora_rank": 8}, r"lora-rank contradicts method = full"),
        ({"method": "full", "rslora": True}, r"rslora contradicts method = full"),
        ({"method": "full", "adapter": "a"}, r"adapter contradicts method = full"),
        ({"steps": 3, "epochs": 3}, r"steps = 3 and epochs = 3 contradict"),
        ({"warmup": 2.5}, r"warmup must be a whole number of updates, or a fraction"),
        ({"warmup": -1}, r"warmup must be at least 0"),
        ({"final_lr_fraction": 2}, r"final-lr-fraction must be at most 1"),
        ({"final_lr_fraction": -0.1}, r"final-lr-fraction must be at least 0"),
        ({"eps": 0}, r"eps must be at least 1e-20, got 0\.0; leave it out for 1e-08"),
        ({"eps": 1e-50}, r"eps must be at least 1e-20"),  # 0 in float32
        ({"lr": -1e-4}, r"lr must be above 0, got -0\.0001; leave it out for automatic"),
        ({"lr": 0}, r"lr must be above 0, got 0\.0; leave it out for automatic"),
        ({"steps": 0}, r"steps must be at least 1, got 0; leave it out for automatic"),
        ({"epochs": 0}, r"epochs must be at least 1, got 0; leave it out for automatic"),
        ({"lr": 2e4}, r"lr must be at most 1000"),
        ({"lr": 10**400}, r"lr must be a finite number"),
        ({"weight_decay": -0.1}, r"weight-decay must be at least 0"),
        ({"lr": 0.5, "weight_decay": 3}, r"lr times weight-decay.* must be at most 1, got 0\.5 times 3; lower one"),
        ({"weight_decay": 1e4}, r"lr times weight-decay"),  # of the automatic rate
        ({"grad_clip": -1}, r"grad-clip must be at least 0"),
        ({"beta1": 1}, r"beta1 must be below 1"),
        ({"beta2": -0.1}, r"beta2 must be at least 0"),
        ({"out": "a\0b"}, r"out must be text without zero bytes and broken characters, got 'a\\x00b'"),
        ({"out": "a\udce9"}, r"out must be text without zero bytes"),
        ({"resume": "sometimes"}, r"resume must be auto, never or a step"),
        ({"resume": 0}, r"resume must be auto, never or a step"),
        ({"seq_len": 1}, r"seq-len must be at least 2"),
        ({"seq_len": 1.5}, r"seq-len must be a whole number, got 1\.5"),
        ({"seq_len": True}, r"seq-len must be a whole number, got True"),
        ({"lr": "fast"}, r"lr must be a finite number, got 'fast'"),
        ({"packing": "maybe"}, r"packing must be true or false"),
        ({"model": 3}, r"model must be text, got 3"),
        ({"dtype": "fp32", "master_dtype": "bf16"}, r"master-dtype = bf16 is coarser"),
        ({"export_dtype": "bf16"}, r"export-dtype concerns method = full"),
        ({"weight_deca": 1}, r"unknown key 'weight_deca'; the nearest is 'weight-decay'"),
        ({"batchsize": 1}, r"unknown key 'batchsize'; the nearest is 'batch-size'"),
    ],
)
def test_refuses_by_name(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        finetune(**keys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("matmul", "fp8"),
        ("offload", ("m", "v")),
        ("offload", ("grads", "weights")),
    ],
)
def test_what_does_not_work_yet_is_refused_never_ignored(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{key.replace('_', '-')} = .* does not work yet; what works now is"):
        finetune(**{key: value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dp": 2}, r"dp is what remains of gpus after pp and tp; got dp = 2, where 1 remain; leave dp out"),
        ({"dp": 2, "gpus": 8, "pp": 2}, r"got dp = 2, where 4 remain"),
        ({"pp": 2}, r"gpus must be a multiple of pp x tp; got gpus = 1, pp = 2 and tp = 1; set gpus = 2"),
        ({"pp": 2, "tp": 2, "gpus": 6}, r"got gpus = 6, pp = 2 and tp = 2; set gpus = 8"),
        ({"pp_schedule": "zb-h1"}, r"concern pipelines, pp = 2 or more; got pp = 1, pp-schedule = zb-h1"),
        ({"microbatches": 2}, r"concern pipelines.* microbatches = 2; set pp, or leave them out"),
        ({"zero": 4}, r"zero must be at most 3, got 4"),
        ({"gpus": -1}, r"gpus must be at least 0, got -1"),
        ({"grad_reduce": "all-to-all"}, r"from zero = 2 on; got zero = 1; set zero = 2, or leave grad-reduce out"),
        ({"gather_by": "copy", "zero": 0}, r"from zero = 1 on; got zero = 0; set zero = 1, or leave gather-by out"),
        ({"send_by": "copy"}, r"got grad-reduce = reduce-scatter; set grad-reduce = all-to-all and zero = 2 or 3, or"),
        ({"send_by": "nvlink"}, r"send-by must be one of nccl, copy; got 'nvlink'"),
        (
            {"gpus": 2, "offload": "grads"},
            r"offload = grads beside several ranks .* zero = 2 or 3; got zero = 1 and 2 ranks; set zero = 2, or leave",
        ),
        (
            {"gpus": 2, "dtype": "bf16", "grad_dtype": "fp32"},
            r"grad-dtype = fp32 beside dtype = bf16 .* zero = 2 or 3; got zero = 1 and 2 ranks; set zero = 2, or",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_with_a_remedy(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        finetune(**keys)


def test_what_ranks_can_do_is_legal() -> None:
    assert finetune(gpus=2, zero=3, grad_reduce="all-to-all", dtype="bf16", grad_dtype="fp32").options().dp == 0
    assert finetune(gpus=2, device="cpu").resolved().options().dp == 2
    Options(dtype="bf16", grad_dtype="fp32")  # one rank
    finetune(gpus=2, zero=2, grad_reduce="all-to-all", gather_by="copy", send_by="copy")
    for zero in range(4):
        Options(offload=("grads",), zero=zero)


@pytest.mark.parametrize("keys", [{"gather_by": "copy"}, {"zero": 2, "grad_reduce": "all-to-all", "send_by": "copy"}])
def test_copies_need_linux(keys: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(device="cpu", **keys)  # type: ignore[arg-type]
    options.resolved()
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="as on Linux, this is darwin; set nccl for both, or leave them out"):
        options.resolved()


def test_a_flag_for_gpus_replaces_the_files_dp(tmp_path: Path) -> None:
    """A run that went over two ranks goes on over one."""
    file = tmp_path / "run.toml"
    file.write_text('model = "x"\ndata = "y"\ngpus = 2\ndp = 2\n', encoding="utf-8")
    assert parse(FinetuneConfig, [str(file)]).dp == 2
    assert parse(FinetuneConfig, [str(file), "--gpus", "1"]).dp == 0


def test_log_sinks_have_names() -> None:
    assert finetune(log="wandb,tensorboard").log == ("wandb", "tensorboard")
    with pytest.raises(UsageError, match="log must be among tensorboard, wandb, trackio; got 'wandbee'"):
        finetune(log="wandbee")


def test_products_have_the_weights_dtype_for_now() -> None:
    with pytest.raises(UsageError, match="matmul = fp32 beside dtype = bf16 does not work yet"):
        build(Options, {"dtype": "bf16", "matmul": "fp32"})
    with pytest.raises(UsageError, match="does not work yet"):  # dtype is automatic, which is fp32 on a CPU
        build(Options, {"device": "cpu", "matmul": "bf16"}).resolved()


@pytest.mark.parametrize("key", ["master_dtype", "grad_dtype"])
def test_nothing_is_kept_coarser_than_the_weights(key: str) -> None:
    assert getattr(build(Options, {"dtype": "bf16", key: "fp32"}), key) == "fp32"
    with pytest.raises(UsageError, match=f"{key.replace('_', '-')} = bf16 is coarser than dtype = fp32"):
        build(Options, {"device": "cpu", key: "bf16"}).resolved()


def test_resolved_says_what_automatic_meant() -> None:
    lora = Options(method="lora", dtype="bf16", device="cpu").resolved()
    assert (lora.master_dtype, lora.m_dtype, lora.v_dtype, lora.grad_dtype) == ("fp32", "fp32", "fp32", "bf16")
    full = Options(dtype="bf16", device="cpu").resolved()
    assert (full.master_dtype, full.matmul, full.dp) == ("bf16", "bf16", 1)
    assert Options(device="cpu").resolved().dtype == "fp32"
    assert Options(dtype="fp32", m_dtype="bf16", device="cpu").resolved().m_dtype == "bf16"
    assert finetune(device="cpu").resolved().lr == 2e-4
    assert finetune(device="cpu", method="full").resolved().lr == 1e-5
    assert finetune(device="cpu", lr=1e-3).resolved().lr == 1e-3


def test_missing_gpu_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no NVIDIA GPU here; set device = cpu"):
        Options(device="cuda").resolved()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5"):
        Options(device="cuda").resolved()


def test_options_are_those_of_the_run() -> None:
    options = finetune(lora_rank=4, recompute=("ffn",), seed=7).options()
    assert type(options) is Options
    assert (options.method, options.lora_rank, options.recompute, options.seed) == ("lora", 4, ("ffn",), 7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("cls", [FinetuneConfig, BenchConfig, PlanConfig, GenerateConfig])
def test_every_number_must_be_finite(cls: type, value: float) -> None:
    needed = RUN if cls is FinetuneConfig else {"model": "m"} | ({"prompt": "p"} if cls is GenerateConfig else {})
    numbers = [f.name for f in dataclasses.fields(cls) if f.type.split(" | ")[0] in ("int", "float")]
    assert len(numbers) >= 4
    for name in numbers:
        with pytest.raises(
            UsageError, match=rf"{name.replace('_', '-')} must be a (finite|whole) number.*, got {value}"
        ):
            build(cls, needed | {name: value})


def test_every_number_has_bounds() -> None:
    """A key without any would take nonsense: -1, or what float32 has no room for."""
    for cls in (FinetuneConfig, BenchConfig, PlanConfig, GenerateConfig):
        for f in dataclasses.fields(cls):
            if f.type.split(" | ")[0] in ("int", "float") and f.name != "resume":
                assert f.metadata["now"] or any(f.metadata[bound] is not None for bound, _, _ in BOUNDS), f.name


def test_what_is_automatic_is_said_and_0_is_not() -> None:
    assert finetune(device="cpu", lr=None).resolved().lr == 2e-4
    assert "learning rate; automatic: 2e-4 for LoRA" in help_text(FinetuneConfig, "finetune", "summary")
    for name in ("lr", "grad_accum"):
        with pytest.raises(
            UsageError, match=f"{name.replace('_', '-')} must be .*, got 0.*; leave it out for automatic"
        ):
            build(BenchConfig, {"model": "m", name: 0})


def test_numbers_of_numpy_are_numbers() -> None:
    config = finetune(
        steps=np.int64(1), lr=np.float32(0.5), packing=np.bool_(False), seed=np.array(7), resume=np.int32(3)
    )
    assert (config.steps, config.lr, config.packing, config.seed, config.resume) == (1, 0.5, False, 7, 3)
    assert {type(v) for v in (config.steps, config.seed, config.resume)} == {int}
    with pytest.raises(UsageError, match="seq-len must be a whole number"):
        finetune(seq_len=np.float64(8))
    with pytest.raises(UsageError, match="seq-len must be a whole number"):
        finetune(seq_len=np.array([8]))


def test_choices_are_those_of_the_layers_below() -> None:
    """config imports none of them, so the lists stand twice."""
    assert LORA_TARGETS == PROJECTIONS
    fields = {f.name: f for f in dataclasses.fields(FinetuneConfig)}
    assert fields["schedule"].metadata["choices"] == SCHEDULES
    assert tuple(trainer.DTYPES) == DTYPES
    assert {name: fields[name].metadata["choices"] for name in ("thinking", "truncate", "train_on")} == {
        "thinking": typing.get_args(Thinking),
        "truncate": typing.get_args(Truncate),
        "train_on": typing.get_args(Supervise),
    }


def test_graphs_can_be_switched_off() -> None:
    assert finetune().options().graphs is True
    config = parse(FinetuneConfig, ["--model", "m", "--data", "d", "--no-graphs"])
    assert config.options().graphs is False
    assert re.search(r"--graphs +on a GPU, .* CUDA graphs \(default true\)", help_text(FinetuneConfig, "finetune", "s"))


def test_the_help_tells_what_data_is_trained_and_evaluated_on() -> None:
    text = help_text(FinetuneConfig, "finetune", "summary")
    assert "a directory (trains on its train.jsonl, evaluates on validation.jsonl, else test.jsonl)" in text
    assert "ami (that Hub set: trains on train and validation, evaluates on test)" in text


def test_two_ways_to_write_a_list_are_one_configuration() -> None:
    assert finetune(lora_targets="v_proj,q_proj") == finetune(lora_targets=["q_proj", "v_proj"])


def test_epochs_default_to_three_unless_steps_are_given() -> None:
    assert (finetune().epochs, finetune().steps) == (3, None)
    assert (finetune(steps=5).epochs, finetune(steps=5).steps) == (None, 5)


def test_missing_keys_are_named() -> None:
    with pytest.raises(UsageError, match="data is missing; give --data"):
        build(FinetuneConfig, {"model": "m"})


def test_flags_win_over_the_file_and_tables_are_for_reading(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "m"\n[rows]\ndata = "d.jsonl"\nseq-len = 64\n[rows.more]\nbatch_size = 2\n'
        '[lora]\nlora-targets = ["q_proj", "v_proj"]\nresume = 7\n',
        encoding="utf-8",
    )
    config = parse(FinetuneConfig, [str(file), "--seq_len", "32", "--lr=0.5", "--no-packing"])
    assert (config.model, config.data, config.seq_len, config.batch_size) == ("m", "d.jsonl", 32, 2)
    assert (config.lora_targets, config.lr, config.packing, config.resume) == (("q_proj", "v_proj"), 0.5, False, 7)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--packing", "off"], False),
        (["--packing", "true"], True),
        (["--packing=no"], False),
        (["--no-packing"], False),
        (["--packing"], True),
        (["--packing", "--lr", "1"], True),
    ],
)
def test_ways_to_write_a_switch(flags: list[str], expected: bool) -> None:
    assert parse(FinetuneConfig, ["--model", "m", "--data", "d", *flags]).packing is expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "fast"], "lr must be a finite number, got 'fast'"),
        (["--lr", "inf"], "lr must be a finite number"),
        (["--seq-len", "1e3"], "seq-len must be a whole number, got '1e3'"),
        (["--seq-len"], "--seq-len needs a value"),
        (["--seq-len", "--lr", "1"], "--seq-len needs a value"),
        (["--seq-len", "8", "--seq-len", "9"], "seq-len is given twice"),
        (["--packing=maybe"], "packing must be true or false, got 'maybe'"),
        (["--packing", "maybe"], "packing must be true or false, got 'maybe'"),
        (["--no-lr"], "unknown key 'no-lr'"),
        (["extra"], "unexpected 'extra'"),
        (["--epochs", "1", "--steps", "1"], "contradict"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(FinetuneConfig, ["--model", "m", "--data", "d", *flags])


def test_a_flag_replaces_the_files_other_way_to_say_how_long(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(finetune(epochs=2)), encoding="utf-8")
    config = parse(FinetuneConfig, [str(file), "--steps", "9"])
    assert (config.steps, config.epochs) == (9, None)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("model = ", ConfigError, "not valid TOML"),
        ("modle = 'm'\n", UsageError, "unknown key 'modle'; the nearest is 'model'"),
        ("seq-len = '12'\n", UsageError, "seq-len must be a whole number, got '12'"),
        ("[a]\nlr = 1\n[b]\nlr = 2\n", UsageError, "lr is given twice"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        parse(FinetuneConfig, [str(file)])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file"):
        parse(FinetuneConfig, ["nowhere.toml"])


def test_toml_round_trip_keeps_every_key(tmp_path: Path) -> None:
    nasty = 'a "quoted" \\ name\twith\n\x7f \u2028 é'
    config = finetune(model=nasty, lr=1e-5, eps=1e-12, lora_targets=("v_proj",), packing=False, resume=12, steps=4)
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    assert parse(FinetuneConfig, [str(file)]) == config
    written = [line.split(" = ")[0] for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    assert written[:2] == ["model", "data"]
    names = {f.name.replace("_", "-") for f in dataclasses.fields(FinetuneConfig)}
    assert sorted(written) == sorted(names - {"epochs"})  # which steps replace


def test_help_names_every_key_with_its_default() -> None:
    text = help_text(FinetuneConfig, "finetune", "summary")
    for f in dataclasses.fields(FinetuneConfig):
        assert f"--{f.name.replace('_', '-')} " in text
    assert "tokens per row (default 1024)" in text
    assert "(required)" in text


def test_positional_keys() -> None:
    @dataclasses.dataclass(frozen=True)
    class Copy:
        source: str = dataclasses.field(default="", metadata={})
        target: str = dataclasses.field(default="", metadata={})

    assert parse(Copy, ["a", "b"], ("source", "target")) == Copy("a", "b")
    with pytest.raises(UsageError, match="unexpected 'c'"):
        parse(Copy, ["a", "b", "c"], ("source", "target"))
    # a word after a switch may be such a key
    config = parse(BenchConfig, ["--deterministic", "m"], ("model",))
    assert (config.deterministic, config.model) == (True, "m")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_without_the_package(dtype: str) -> None:
    """Automatic is torch's own where FlashAttention-4 cannot be; asking for it is an error that says why."""
    assert Options(device="cpu", dtype=dtype).resolved().attention == "torch"
    with pytest.raises(
        ConfigError, match=r"attention = flash4 needs a GPU of .*; set attention = torch or leave it out"
    ):
        Options(device="cpu", dtype=dtype, attention="flash4").resolved()


@pytest.mark.parametrize(
    ("attention", "dtype", "capability", "installed", "outcome"),
    [
        ("", "bf16", (9, 0), FLASH4_VERSION, "flash4"),
        ("", "bf16", (9, 0), "", "torch"),
        ("", "bf16", (9, 0), "4.1.0", "torch"),
        ("", "bf16", (8, 9), FLASH4_VERSION, "torch"),
        ("", "bf16", (10, 0), FLASH4_VERSION, "torch"),
        ("", "fp32", (9, 0), FLASH4_VERSION, "torch"),
        ("torch", "bf16", (9, 0), FLASH4_VERSION, "torch"),
        ("flash4", "bf16", (9, 0), FLASH4_VERSION, "flash4"),
        ("flash4", "bf16", (9, 0), "", r"needs flash-attn-4 4.0.0b36 .*fullstride\[flash4\].*, here is none"),
        ("flash4", "bf16", (9, 0), "4.1.0", "needs flash-attn-4 4.0.0b36 .* here is 4.1.0"),
        ("flash4", "bf16", (8, 9), FLASH4_VERSION, "needs a GPU of compute capability 9.0"),
        ("flash4", "fp32", (9, 0), FLASH4_VERSION, "has no fp32"),
    ],
)
def test_attention_on_a_gpu(
    attention: str,
    dtype: str,
    capability: tuple[int, int],
    installed: str,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    def version(package: str) -> str:
        assert package == "flash-attn-4"
        if not installed:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("fullstride.config.version", version)
    if outcome in ("torch", "flash4"):
        assert resolve_attention(attention, "cuda", dtype) == outcome
    else:
        with pytest.raises(ConfigError, match=f"attention = flash4 {outcome}"):
            resolve_attention(attention, "cuda", dtype)


def test_the_extra_installs_the_version_that_is_called() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f"flash-attn-4[cu13]=={FLASH4_VERSION}" in project
