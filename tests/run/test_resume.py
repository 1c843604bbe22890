"""Runs that go on: resume, what counts as another run, interruption, failure."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import fullstride as fs
from fullstride.config.keys import build, parse
from fullstride.config.training import FinetuneConfig
from fullstride.errors import ConfigError
from fullstride.run import directory as directory_module
from fullstride.run import training as module
from fullstride.run.finetune import run_finetune
from fullstride.run.inputs import EDGE, weights_digest
from fullstride.run.interrupt import Stopped
from fullstride.run.metrics import read_events, read_metrics
from fullstride.run.prepare import prepare
from tests.run.conftest import damaged, exact, keys, run, tree, write_rows

# ---- resume


class Crash(Exception):
    pass


def crash_after(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """Make the trainer fail in the update after so many."""
    original, count = fs.Trainer.update, [0]

    def update(self: fs.Trainer, **hyper: Any) -> dict[str, float]:
        count[0] += 1
        if count[0] > updates:
            raise Crash
        return original(self, **hyper)

    monkeypatch.setattr(fs.Trainer, "update", update)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_cases_22_and_24_resumed_equals_uninterrupted(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, method: str
) -> None:
    """20 rows, batch 2, 3 epochs: 30 updates. Saved at 13, crash after 15, resumed: the same bits as without."""
    more: dict[str, Any] = {"grad_accum": 1, "epochs": 3, "method": method, "eval_every": 14, "save_every": 13}
    if method == "lora":
        more["lora_dropout"] = 0.1
    run(model_dir, data_dir, tmp_path / "whole", **more)
    with monkeypatch.context() as patch:
        crash_after(patch, 15)
        with pytest.raises(Crash):
            run(model_dir, data_dir, tmp_path / "broken", **more)
    assert len(read_metrics(tmp_path / "broken" / "metrics.csv")) == 15
    with (tmp_path / "broken" / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("single,2,16,0.1")  # torn by the crash
    with (tmp_path / "broken" / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "upd')

    run(model_dir, data_dir, tmp_path / "broken", **more)
    assert exact(tmp_path / "broken") == exact(tmp_path / "whole")
    text = (tmp_path / "broken" / "metrics.csv").read_text(encoding="utf-8")
    assert text.count("strategy") == 1
    assert [int(row["step"]) for row in read_metrics(tmp_path / "broken" / "metrics.csv")] == list(range(1, 31))
    events = read_events(tmp_path / "broken" / "log.jsonl")
    assert [e["step"] for e in events if e["event"] == "update"] == list(range(1, 31))
    assert [e["step"] for e in events if e["event"] == "resume"] == [13]
    exported = "adapter/adapter_model.safetensors" if method == "lora" else "model/model.safetensors"
    assert (tmp_path / "broken" / exported).read_bytes() == (tmp_path / "whole" / exported).read_bytes()


def test_checkpoints_are_kept_and_resumed_by_number(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=6, save_every=1, keep=3)
    kept = [p.name for p in sorted((out / "checkpoints").iterdir())]
    assert kept == ["latest", "step_00000004", "step_00000005", "step_00000006"]
    with pytest.raises(ConfigError, match=r"no checkpoint of step 2; there are: step_00000004.*06"):
        run(model_dir, data_dir, out, steps=6, resume=2)
    before = exact(out)
    result = run(model_dir, data_dir, out, steps=6, keep=3, resume=4)
    assert result.steps == 6 and exact(out) == before
    assert parse(FinetuneConfig, [str(out / "run.toml")]).resume == "auto"  # run.toml goes on, not back to 4 again
    assert sorted(p.name for p in (out / "checkpoints").glob("step_*")) == ["step_00000004", "step_00000006"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_checkpoints_in_the_background(model_dir: Path, data_dir: Path, tmp_path: Path, gpus: int) -> None:
    """The same run, the same checkpoints; each is logged, and an older one deleted, when it is whole."""
    more = {"steps": 4, "save_every": 1, "keep": 2, "gpus": gpus, "batch_size": 2 // gpus}
    run(model_dir, data_dir, tmp_path / "plain", **more)
    run(model_dir, data_dir, tmp_path / "async", **more, async_save=True)
    assert exact(tmp_path / "async") == exact(tmp_path / "plain")
    for out in (tmp_path / "plain", tmp_path / "async"):
        kept = [p.name for p in sorted((out / "checkpoints").iterdir())]
        assert kept == ["latest", "step_00000003", "step_00000004"]
        assert [e["step"] for e in read_events(out / "log.jsonl") if e["event"] == "checkpoint"] == [1, 2, 3, 4]
    assert run(model_dir, data_dir, tmp_path / "async", **more | {"steps": 5, "async_save": False}).steps == 5


def test_the_checkpoint_that_latest_names_is_kept(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """Killed between the renaming of a folder and of `latest`: there is a newer one, which nothing has confirmed."""
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=3, save_every=1, keep=3)
    (out / "checkpoints" / "latest").write_text("step_00000001\n", encoding="utf-8")
    directory_module.RunDirectory(out).prune(1)
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["latest", "step_00000001", "step_00000003"]


def test_a_finished_run_may_go_on_and_may_be_repeated(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = run(model_dir, data_dir, out, steps=2)
    again = run(model_dir, data_dir, out, steps=2)
    assert (again.steps, again.loss, again.eval_loss) == (2, None, first.eval_loss)
    assert again.eval_loss_before == first.eval_loss_before
    assert run(model_dir, data_dir, out, steps=4).steps == 4
    assert [int(row["step"]) for row in read_metrics(out / "metrics.csv")] == [1, 2, 3, 4]


def test_another_run_is_refused_and_left_alone(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=1)
    before = {name: (out / name).read_bytes() for name in tree(out)}
    with pytest.raises(ConfigError, match=r"holds another run \(lr was 0\.01, now 0\.02\); choose another --out"):
        run(model_dir, data_dir, out, steps=1, lr=0.02)
    with pytest.raises(ConfigError, match="holds a run and resume = never"):
        run(model_dir, data_dir, out, steps=1, resume="never")
    write_rows(data_dir / "train.jsonl", 19)
    with pytest.raises(ConfigError, match=r"data .* was 20 rows of .*, now it is 19 rows of .*; restore it, or choose"):
        run(model_dir, data_dir, out, steps=1)
    assert {name: (out / name).read_bytes() for name in tree(out)} == before

    other = tmp_path / "papers"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        run(model_dir, data_dir, other, steps=1)
    with pytest.raises(ConfigError, match="is a file"):
        run(model_dir, data_dir, other / "thesis.tex", steps=1)
    assert tree(other) == {"thesis.tex"}


@pytest.mark.parametrize("part", ["train", "validation"])
def test_other_rows_of_the_same_size_are_another_run(
    model_dir: Path, data_dir: Path, tmp_path: Path, part: str
) -> None:
    """Equal numbers of rows and tokens, one digit changed; the rows in another order; the evaluation rows gone."""
    out, file = tmp_path / "run", data_dir / f"{part}.jsonl"
    run(model_dir, data_dir, out, steps=1)
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    name = "data" if part == "train" else "evaluation data of"
    for other in (text.replace("It is ", "It is9", 1), "".join(reversed(lines))):
        file.write_text(other, encoding="utf-8")
        with pytest.raises(
            ConfigError, match=rf"something else \({name} .* was (\d+ rows of \d+ tokens) .* now it is \1"
        ):
            run(model_dir, data_dir, out, steps=2)
    if part == "validation":
        file.unlink()
        with pytest.raises(ConfigError, match=r"evaluation data of .* now it is none"):
            run(model_dir, data_dir, out, steps=2)
    file.write_text(text, encoding="utf-8")
    assert run(model_dir, data_dir, out, steps=2).steps == 2


def test_another_mask_on_the_same_tokens_is_another_run(model_dir: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text('{"prompt": "one two", "completion": " three"}\n' * 4, encoding="utf-8")
    run(model_dir, data, out, steps=1)
    data.write_text('{"prompt": "one", "completion": " two three"}\n' * 4, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"something else \(data "):
        run(model_dir, data, out, steps=2)


def test_other_base_weights_under_the_same_name_are_another_run(
    model_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    model, out = damaged(model_dir, tmp_path / "model"), tmp_path / "run"
    run(model, data_dir, out, steps=1)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"something else \(model .* was sha256 \w+, now it is sha256 \w+\)"):
        run(model, data_dir, out, steps=2)


def test_a_digest_sees_both_ends_of_large_weights(tmp_path: Path) -> None:
    content = bytearray(3 * EDGE)
    digests = set()
    for changed in (None, 0, EDGE - 1, 3 * EDGE - 1):
        if changed is not None:
            content[changed] ^= 1
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(weights_digest(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert len(digests | {weights_digest(tmp_path)}) == 5


def test_a_run_that_is_only_made_writes_nothing(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """Neither for a new run nor for one that would go on."""
    for started in (False, True):
        if started:
            run(model_dir, data_dir, tmp_path / "run", steps=4, save_every=1)
        before = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)}
        resume = 3 if started else "auto"
        job = prepare(build(FinetuneConfig, keys(model_dir, data_dir, tmp_path / "run", steps=4, resume=resume)))
        c = job.config
        with fs.Trainer(
            job.model, c.options(), batch_size=c.batch_size, seq_len=c.seq_len, grad_accum=c.grad_accum
        ) as trainer:
            module.Run(job, trainer, module.load(trainer, job))
        assert {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)} == before
        assert (tmp_path / "run").exists() is started


def test_keys_that_may_change_on_resume(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=2)
    run(model_dir, data_dir, out, epochs=1, save_every=3, eval_every=2, keep=1)
    assert len(read_metrics(out / "metrics.csv")) == 5


@pytest.mark.parametrize("latest", [None, "", "../elsewhere", "step_00000009"])
def test_without_a_true_latest_the_newest_whole_checkpoint_counts(
    model_dir: Path, data_dir: Path, tmp_path: Path, latest: str | None
) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=4, save_every=2)
    (out / "checkpoints" / "step_00000009").mkdir()  # not whole
    if latest is None:
        (out / "checkpoints" / "latest").unlink()
    else:
        (out / "checkpoints" / "latest").write_text(latest, encoding="utf-8")
    assert run(model_dir, data_dir, out, steps=5).steps == 5
    assert [e["step"] for e in read_events(out / "log.jsonl") if e["event"] == "resume"] == [4]


def test_checkpoints_that_are_not_whole_are_never_deleted(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=2)
    (out / "checkpoints" / "step_00000002" / "state.json").unlink()
    before = {name: (out / name).read_bytes() for name in tree(out)}
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no whole checkpoint \(it holds .*step_00000002\); restore one, remove"):
            run(model_dir, data_dir, out, steps=2)
        (out / "checkpoints" / "latest").unlink(missing_ok=True)
    assert {name: (out / name).read_bytes() for name in tree(out)} == {
        name: content for name, content in before.items() if name != "checkpoints/latest"
    }
    shutil.rmtree(out / "checkpoints")  # as the message says
    assert run(model_dir, data_dir, out, steps=2).steps == 2


def test_going_back_says_which_checkpoints_it_deletes(model_dir: Path, data_dir: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=3, save_every=1, keep=3)
    run(model_dir, data_dir, out, steps=3, resume=1)
    assert "checkpoints after step 1 are deleted: step_00000003, step_00000002" in capsys.readouterr().out
    dropped = [e["checkpoints"] for e in read_events(out / "log.jsonl") if e["event"] == "dropped"]
    assert dropped == [["step_00000003", "step_00000002"]]


def test_what_a_killed_process_leaves_is_cleaned(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while an old checkpoint is deleted, and while a new one is written."""
    out = tmp_path / "run"

    def killed(path: Path) -> None:
        next(path.glob("*.json")).unlink()
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(directory_module.shutil, "rmtree", killed)
        with pytest.raises(Crash):
            run(model_dir, data_dir, out, steps=4, save_every=1, keep=1)
    assert (out / "checkpoints" / ".step_00000001.removed").is_dir()
    (out / "checkpoints" / ".step_00000007.partial").mkdir()
    assert run(model_dir, data_dir, out, steps=4, save_every=1, keep=1).steps == 4
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["latest", "step_00000004"]


def test_a_run_killed_in_its_first_save_starts_anew(model_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=1)
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints" / ".step_00000001.partial").mkdir(parents=True)
    assert run(model_dir, data_dir, out, steps=1).loss is not None


def test_a_directory_is_one_process(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """A second run is refused before it writes and before weights are loaded; the first is not disturbed."""
    out, original = tmp_path / "run", fs.Trainer.update

    def update(self: fs.Trainer, **hyper: Any) -> dict[str, float]:
        monkeypatch.setattr(fs.Trainer, "update", original)
        before = {name: (out / name).read_bytes() for name in tree(out)}
        for more in ({}, {"lr": 1.0}):
            with monkeypatch.context() as patch, pytest.raises(ConfigError, match="another process is at work in"):
                patch.setattr(module, "Trainer", None)
                run(model_dir, data_dir, out, steps=2, **more)
        assert {name: (out / name).read_bytes() for name in tree(out)} == before
        return original(self, **hyper)

    monkeypatch.setattr(fs.Trainer, "update", update)
    assert run(model_dir, data_dir, out, steps=2).steps == 2


def test_a_run_that_another_process_has_changed_meanwhile_is_refused(
    model_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    """It was prepared before the other one held the directory: what it knows is no longer true."""
    out = tmp_path / "run"
    job = prepare(build(FinetuneConfig, keys(model_dir, data_dir, out, steps=2)))
    c = job.config
    with fs.Trainer(
        job.model, c.options(), batch_size=c.batch_size, seq_len=c.seq_len, grad_accum=c.grad_accum
    ) as trainer:
        late = module.Run(job, trainer, module.load(trainer, job))
        run(model_dir, data_dir, out, steps=2)
        before = {name: (out / name).read_bytes() for name in tree(out)}
        with pytest.raises(ConfigError, match=r"another process has been at work in .* meanwhile; start again"):
            late.train()
    assert {name: (out / name).read_bytes() for name in tree(out)} == before


def test_fewer_updates_than_are_done_are_refused(model_dir: Path, data_dir: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    run(model_dir, data_dir, out, steps=3)
    before = {name: (out / name).read_bytes() for name in tree(out)}
    with pytest.raises(ConfigError, match="has 3 updates behind it, and now it is to have 2 in all; give at least 3"):
        run(model_dir, data_dir, out, steps=2)
    capsys.readouterr()
    run(model_dir, data_dir, out, steps=3, save_every=7)
    assert "nothing is left to do: all 3 updates are done" in capsys.readouterr().out
    assert {name: (out / name).read_bytes() for name in tree(out)} == before
    shutil.rmtree(out / "adapter")  # then there is
    assert run(model_dir, data_dir, out, steps=3).adapter == out / "adapter"
    assert (out / "adapter" / "adapter_model.safetensors").is_file()


def test_a_run_goes_on_without_the_adapter_it_began_with(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = run(model_dir, data_dir, tmp_path / "first", steps=1).adapter
    assert adapter is not None
    shutil.copytree(adapter, tmp_path / "begun")
    run(model_dir, data_dir, tmp_path / "run", steps=1, adapter="begun")
    shutil.rmtree(tmp_path / "begun")
    assert run(model_dir, data_dir, tmp_path / "run", steps=2, adapter="begun").steps == 2
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        run(model_dir, data_dir, tmp_path / "new", steps=1, adapter="begun")


def test_deleted_data_is_missing_not_another_run(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(data_dir)
    for name, key in (("validation.jsonl", "eval-data"), ("train.jsonl", "data")):
        run(model_dir, Path("train.jsonl"), tmp_path / f"run-{key}", steps=1, eval_data="validation.jsonl")
        Path(name).rename("away")
        with pytest.raises(ConfigError, match=rf"^{key}: no such file or directory: {name}"):
            run(model_dir, Path("train.jsonl"), tmp_path / f"run-{key}", steps=2, eval_data="validation.jsonl")
        Path("away").rename(name)


@pytest.mark.parametrize("data", ["a.jsonl, b.jsonl", "a,b.jsonl", "a,b.jsonl,a.jsonl", "di,r", "./sample"])
def test_every_run_toml_can_be_run_again(model_dir: Path, tmp_path: Path, monkeypatch, data: str) -> None:
    here = tmp_path / "with, a comma"
    (here / "di,r").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "a,b.jsonl", "di,r/train.jsonl", "sample"):
        write_rows(here / name, 4)
    monkeypatch.chdir(here)
    model = damaged(model_dir, here / "mo,del")
    run(model.relative_to(here), Path(data), Path("r,un"), steps=1)
    monkeypatch.chdir("/")
    config = parse(FinetuneConfig, [str(here / "r,un" / "run.toml"), "--steps", "2"])
    assert run_finetune(config).steps == 2


# ---- interruption and failure


def test_when_the_reader_goes_away_the_state_is_saved(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    more = {"steps": 4, "eval_every": 2}
    run(model_dir, data_dir, tmp_path / "whole", **more)
    original = module.Progress.line
    for words in ("step 2/4", "evaluation at step 2", "resumed at step 2"):
        out = tmp_path / words.replace("/", " of ")

        def line(self: module.Progress, text: str, words=words) -> None:
            if text.startswith(words):
                raise BrokenPipeError
            original(self, text)

        if words.startswith("resumed"):
            shutil.copytree(tmp_path / "step 2 of 4", out)
        with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
            patch.setattr(module.Progress, "line", line)
            run(model_dir, data_dir, out, **more)
        assert (out / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step_00000002"
        assert read_events(out / "log.jsonl")[-1]["event"] == "interrupted"
    for words in ("step 2 of 4", "evaluation at step 2", "resumed at step 2"):
        run(model_dir, data_dir, tmp_path / words, **more)
        assert exact(tmp_path / words) == exact(tmp_path / "whole")


def test_stop_drops_the_window_saves_and_resumes(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """A signal in the middle of the third window: the state of update 2 is saved, and the end is the same bits."""
    run(model_dir, data_dir, tmp_path / "whole", steps=5)
    original, count = fs.Trainer.step, [0]
    with monkeypatch.context() as patch:
        stops: list[module.StopRequest] = []
        made = module.StopRequest
        patch.setattr(module, "StopRequest", lambda: stops.append(made()) or stops[-1])

        def step(self: fs.Trainer, *batch: Any) -> None:
            original(self, *batch)
            count[0] += 1
            stops[0].requested = count[0] == 5

        patch.setattr(fs.Trainer, "step", step)
        with pytest.raises(Stopped):
            run(model_dir, data_dir, tmp_path / "stopped", steps=5)
    out = tmp_path / "stopped"
    assert f"state of step 2 is saved; resume with: fullstride finetune {out}/run.toml" in capsys.readouterr().out
    assert (out / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step_00000002"
    assert not (out / "adapter").exists()
    run(model_dir, data_dir, out, steps=5)
    assert exact(out) == exact(tmp_path / "whole")


def test_stop_during_an_evaluation_keeps_the_update(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    stops: list[module.StopRequest] = []
    made, original = module.StopRequest, fs.Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(module, "StopRequest", lambda: stops.append(made()) or stops[-1])

        def update(self: fs.Trainer, **hyper: Any) -> dict[str, float]:
            stops[0].requested = hyper["step"] == 2
            return original(self, **hyper)

        patch.setattr(fs.Trainer, "update", update)
        with pytest.raises(Stopped):
            run(model_dir, data_dir, tmp_path / "run", steps=4, eval_every=1)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [(row["step"], bool(row["eval_loss"])) for row in rows] == [("1", True), ("2", False)]
    assert run(model_dir, data_dir, tmp_path / "run", steps=4, eval_every=1).steps == 4
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == ["1", "2", "3", "4"]


def test_stop_in_the_evaluation_that_ends_an_epoch_keeps_all_adapters(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    """Stopped in the evaluations after updates 5 and 10, where epochs end; then resumed: the run's end is the same."""
    more = {"epochs": 3, "eval_every": 5}
    run(model_dir, data_dir, tmp_path / "whole", **more)
    out, original, made = tmp_path / "stopped", fs.Trainer.update, module.StopRequest
    for stop_at in (5, 10, 15):
        with monkeypatch.context() as patch:
            stops: list[module.StopRequest] = []
            patch.setattr(module, "StopRequest", lambda stops=stops: stops.append(made()) or stops[-1])

            def update(self: fs.Trainer, stops=stops, stop_at=stop_at, **hyper: Any) -> dict[str, float]:
                stops[0].requested = hyper["step"] == stop_at
                return original(self, **hyper)

            patch.setattr(fs.Trainer, "update", update)
            with pytest.raises(Stopped):
                run(model_dir, data_dir, out, **more)
        rows = read_metrics(out / "metrics.csv")
        assert (rows[-1]["step"], rows[-1]["eval_loss"]) == (str(stop_at), "")
        assert (out / "adapters" / f"epoch_{stop_at // 5}" / "adapter_model.safetensors").is_file()
    result = run(model_dir, data_dir, out, **more)
    assert exact(out) == exact(tmp_path / "whole")  # the evaluations that were stopped are made up for
    assert result.eval_loss is not None
    for name in ("adapters/epoch_1", "adapters/epoch_2", "adapters/epoch_3", "adapter"):
        file = f"{name}/adapter_model.safetensors"
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_non_finite_evaluation_is_an_error(model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """The last update may have spoilt the weights: nothing after it would show that."""
    original = fs.Trainer.validate

    def validate(self: fs.Trainer, *batch: Any) -> dict[str, float]:
        measured = original(self, *batch)
        return {**measured, "loss": float("nan")} if self.engine.updates == 3 else measured

    monkeypatch.setattr(fs.Trainer, "validate", validate)
    with pytest.raises(ConfigError, match=r"evaluation loss nan at step 3; checkpoint of step 2 is good"):
        run(model_dir, data_dir, tmp_path / "run", steps=3, save_every=2)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step_00000002"
    assert len(read_metrics(tmp_path / "run" / "metrics.csv")) == 3
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize("method", ["lora", "full"])
def test_spoilt_weights_are_never_saved_or_exported(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch, method: str
) -> None:
    """The last update's loss is measured before it, and without evaluation rows nothing comes after."""
    original = fs.Trainer.update

    def update(self: fs.Trainer, **hyper: Any) -> dict[str, float]:
        metrics = original(self, **hyper)
        if hyper["step"] == 5:
            next(iter(self.engine.state.trained.values())).param[0] = float("nan")
        return metrics

    monkeypatch.setattr(fs.Trainer, "update", update)
    with pytest.raises(
        ConfigError, match=r"weights are infinite or NaN after step 5; checkpoint of step 4 is good\. Lower lr"
    ):
        run(model_dir, data_dir / "train.jsonl", tmp_path / "run", epochs=1, save_every=2, method=method)
    names = {name for name in tree(tmp_path / "run") if not name.startswith("checkpoints/step_0000000")}
    assert names == {".lock", "run.toml", "metrics.csv", "log.jsonl", "checkpoints/latest"}
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step_00000004"


def test_non_finite_loss_stops_before_anything_is_saved(
    model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    original = fs.Trainer.update

    def update(self: fs.Trainer, **hyper: Any) -> dict[str, float]:
        metrics = original(self, **hyper)
        return {**metrics, "loss": float("nan")} if hyper["step"] == 4 else metrics

    monkeypatch.setattr(fs.Trainer, "update", update)
    with pytest.raises(ConfigError, match=r"loss nan.* at step 4 \(rows .*train\.jsonl line \d+.*checkpoint of step 2"):
        run(model_dir, data_dir, tmp_path / "run", steps=6, save_every=2)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step_00000002"
    assert len(read_metrics(tmp_path / "run" / "metrics.csv")) == 3
    assert read_events(tmp_path / "run" / "log.jsonl")[-1]["event"] == "non-finite"
