"""A run: trainer -> updates, evaluations, checkpoints -> adapter or model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fullstride.data.loader import Batch
from fullstride.engine.lr import learning_rate
from fullstride.errors import ConfigError, OutOfMemory, WorkerError
from fullstride.run.flops import model_flops, peak_flops
from fullstride.run.interrupt import Stopped, StopRequest
from fullstride.run.job import Job
from fullstride.run.metrics import EventLog, MetricsFile, read_events, strategy, update_row
from fullstride.run.plot import plot_loss
from fullstride.run.profiling import Tracer
from fullstride.run.progress import Progress
from fullstride.run.saving import Checkpoints, check_disk
from fullstride.run.sinks import Sinks
from fullstride.trainer.ranks import leads
from fullstride.trainer.team import attended
from fullstride.trainer.trainer import Trainer

Found = TypeVar("Found")


@dataclass(frozen=True)
class RunResult:
    """What a run came to; losses are None where there was nothing to measure, paths where nothing was written."""

    out: Path
    steps: int
    loss: float | None
    eval_loss_before: float | None
    eval_loss: float | None
    adapter: Path | None
    model: Path | None


def run_prepared(prepare: Callable[[], Job], preview: Callable[[Job], None] = lambda job: None) -> RunResult:
    """What every command that trains does: prepare, tell, and train, or with dry-run only `preview`.

    Of the processes that torchrun started, each of which comes here, the first writes and prints for all. They share
    the file system in which the run directory is.
    """
    with ExitStack() as stack:
        stack.enter_context(attended())
        if not leads():
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        job = prepare()
        print("\n".join(job.describe()))
        if not job.config.dry_run:
            return run_job(job)
        preview(job)
        return RunResult(job.directory.path, 0, None, None, None, None, None)


def run_job(job: Job) -> RunResult:
    """Train. The run directory appears once everything that can be refused has been checked."""
    c = job.config
    sizes = {"batch_size": c.batch_size, "seq_len": c.seq_len, "grad_accum": c.grad_accum}
    with Trainer(job.model, c.options(), gpus=c.gpus, **sizes) as trainer:
        state = load(trainer, job)
        trainable, total = trainer.num_parameters
        print(f"parameters: {trainable:,} train of {total:,} ({100 * trainable / total:.2f} %)", flush=True)
        return Run(job, trainer, state).train()


def load(trainer: Trainer, job: Job) -> dict[str, Any]:
    """Give `trainer` its weights; returns what a checkpoint keeps beside them ({} for a new run)."""
    if job.weights is None:
        trainer.init_weights(job.config.seed, job.tokenizer)
    else:
        trainer.import_weights(job.weights, job.tokenizer)
    if not job.resume_step:
        if job.config.adapter:
            trainer.import_adapter(Path(job.config.adapter))
        return {}
    state = trainer.load_checkpoint(job.directory.checkpoints, job.resume_step)
    started = state.get("inputs", {})
    changed = [
        f"{name} was {started.get(name, 'something else')}, now it is {now}"
        for name, now in job.inputs.items()
        if started.get(name) != now
    ]
    if changed:
        raise ConfigError(
            f"out: the run in {job.directory.path} was started with something else ({'; '.join(changed)}); "
            "restore it, or choose another --out or --name"
        )
    return state


class Run:
    """A run under way. `done` is the last completed update, `position` the loader's place after it.

    Nothing is written before `train`.
    """

    def __init__(self, job: Job, trainer: Trainer, state: dict[str, Any]) -> None:
        self.job, self.config, self.trainer = job, job.config, trainer
        self.directory = job.directory
        self.done = job.resume_step
        self.position = job.position
        self.eval_loss_before: float | None = state.get("eval_loss_before")
        self.eval_loss: float | None = None
        self.loss: float | None = None
        self.peak = peak_flops(job.config)
        self.leads = leads()
        self.metrics = MetricsFile(self.directory.path / "metrics.csv", self.leads)
        self.log = EventLog(self.directory.path / "log.jsonl", self.leads)
        self.checkpoints = Checkpoints(self.directory, trainer, job.config, self.log)
        self.tracer = Tracer(trainer, job.config.profile, job.num_steps - job.resume_step, self.directory.path)
        self.stop = StopRequest()
        self.progress = Progress(job.num_steps, job.resume_step + 1)
        self.sinks = Sinks(job.config, self.leads, self.progress.line)

    def train(self) -> RunResult:
        """All updates that are left, evaluations, checkpoints and exports."""
        with (
            self.directory.lock() if self.leads else nullcontext(),
            self.stop,
            self.progress,
            closing(self.sinks),
        ):
            if self.found(self.finished):
                self.eval_loss = self.found(lambda: self.metrics.eval_losses().get(self.done))
                self.progress.line(
                    f"nothing is left to do: all {self.done} updates are done; more: --steps or --epochs"
                )
                return self.result()
            try:
                self.begin()
                for step in range(self.done + 1, self.job.num_steps + 1):
                    self.tracer.before_update()
                    row = self.update(step)
                    for line in self.tracer.after_update():
                        self.progress.line(line)
                    # before the evaluation, which may be stopped: the update is not made again
                    if self.position % self.job.loader.rows_per_epoch == 0:
                        self.end_epoch(self.position // self.job.loader.rows_per_epoch)
                    self.record(row)
                    # last, so that what a checkpoint counts as done is done
                    due = self.config.save_every and step % self.config.save_every == 0
                    if self.checkpoints.is_best(step, row["eval_loss"]) or due:
                        self.save()
            except (WorkerError, OutOfMemory) as error:
                self.log.write("failed", step=self.done, rank=error.rank, error=str(error))
                self.progress.line(f"rank {error.rank} failed after step {self.done}; {self.checkpoints.good()}")
                raise
            except (Stopped, BrokenPipeError) as stop:  # or the reader of our output has gone
                kept = self.interrupted()
                if isinstance(stop, Stopped):
                    self.progress.line(kept)
                raise
            return self.finish()

    def finished(self) -> bool:
        """Whether the last call in this directory has done all of the run, exports included."""
        last = read_events(self.log.path)[-1:]
        ended = any(e["event"] == "end" and e["step"] == self.done == self.job.num_steps for e in last)
        return ended and self.exported.is_dir()

    def found(self, look: Callable[[], Found]) -> Found:
        """What the first process finds in the run directory, in which the others do not look while it writes there."""
        return self.trainer.agree(look() if self.leads else None)[0]

    def check_stop(self) -> None:
        """Raise Stopped once a stop was requested: of any process, in all of them at the same place."""
        if any(self.trainer.agree(self.stop.requested)):
            raise Stopped

    def begin_directory(self) -> tuple[float | None, tuple[int, float] | None]:
        """Begin the run directory, or cut it back to the update from which the run goes on; returns that one's
        evaluation, and the step and evaluation of the best one that is kept."""
        self.check_disk()
        if self.directory.start_step(self.config) != self.done:
            raise ConfigError(f"out: another process has been at work in {self.directory.path} meanwhile; start again")
        self.directory.create(self.config)
        self.directory.clean()
        dropped = self.directory.drop_after(self.done)
        self.metrics.begin(self.done)
        self.log.begin(self.done)
        if dropped:
            self.progress.line(f"checkpoints after step {self.done} are deleted: {', '.join(dropped)}")
            self.log.write("dropped", step=self.done, checkpoints=dropped)
        losses, kept = self.metrics.eval_losses(), self.directory.steps() if self.config.keep_best else []
        evaluated = {step: loss for step, loss in losses.items() if step in kept}
        best = min(evaluated, key=evaluated.__getitem__, default=0)
        self.directory.mark_best(best)
        return losses.get(self.done), (best, evaluated[best]) if best else None

    def check_disk(self) -> None:
        """See saving.check_disk."""
        c, left = self.config, self.job.num_steps - self.done
        every = [n for n in (c.save_every, c.eval_every if c.keep_best else 0) if n]
        saves = 1 + sum(left // n for n in every)
        epochs = -(-left // self.job.updates_per_epoch)
        check_disk(c, self.directory.path, *self.trainer.num_parameters, saves, epochs)

    def begin(self) -> None:
        """What comes before the first update of this call."""
        self.eval_loss, best = self.found(self.begin_directory)
        self.checkpoints.begin(self.done, best)
        self.sinks.begin(self.done)
        self.job.loader.seek(self.position)
        trainable, total = self.trainer.num_parameters
        parameters = {"trainable_parameters": trainable, "parameters": total}
        if self.done:
            self.progress.line(f"resumed at step {self.done} of {self.job.num_steps}")
            self.log.write("resume", step=self.done, num_steps=self.job.num_steps, **parameters)
            if self.eval_loss is None and self.evaluates_after(self.done):  # it was stopped in the evaluation
                self.metrics.complete(self.evaluate())
                self.checkpoints.is_best(self.done, self.eval_loss)
            return
        self.log.write("start", num_steps=self.job.num_steps, **parameters)
        for event in self.job.report.events():
            self.log.write(**event)
        for note in self.job.notes:
            self.log.write("note", text=note)
        self.eval_loss_before = self.evaluate()

    def update(self, step: int) -> dict[str, Any]:
        """One window of micro-steps and the update; returns its row of metrics.csv."""
        c, job = self.config, self.job
        started = time.perf_counter()
        batches = job.loader.next_window(c.grad_accum)
        for batch in batches:
            self.check_stop()
            self.trainer.step(batch.inputs, batch.targets, batch.documents)
        self.check_stop()
        lr = learning_rate(c.schedule, step, job.num_steps, c.rate, c.warmup, c.final_lr_fraction)
        metrics = self.trainer.update(
            lr=lr,
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            step=step,
            weight_decay=c.weight_decay,
            grad_clip=c.grad_clip,
        )
        seconds = time.perf_counter() - started
        row_ids = [row for batch in batches for row in batch.row_ids]
        self.check_finite(step, metrics, row_ids)
        tokens = sum(batch.tokens for batch in batches)
        flops = model_flops(job.model, c, tokens, job.squared_lengths(row_ids))
        row = update_row(
            epoch=self.position // job.loader.rows_per_epoch + 1,
            step=step,
            metrics=metrics,
            lr=lr,
            tokens=tokens,
            seconds=seconds,
            peak_bytes=self.trainer.peak_memory(),
            mfu=None if self.peak is None else flops / seconds / (self.peak * c.ranks),
            strategy=strategy(c),
        )
        self.done, self.position, self.loss = step, job.loader.position, metrics["loss"]
        return row

    def evaluates_after(self, step: int) -> bool:
        every = self.config.eval_every
        return step >= self.job.num_steps or (every > 0 and step % every == 0)

    def record(self, row: dict[str, Any]) -> None:
        """Show the update, evaluate where that is due, and write the update's row."""
        try:
            self.progress.update(row)
            if self.evaluates_after(row["step"]):
                row["eval_loss"] = self.evaluate()
        finally:  # the update has happened: its row is written, also when this is interrupted
            self.metrics.append(row)
            self.log.write("update", **row)
            self.sinks.write(row)

    def check_finite(self, step: int, metrics: dict[str, float], row_ids: list[int]) -> None:
        """Raise ConfigError, before anything is saved, when the update was spoilt."""
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.log.write("non-finite", step=step, loss=str(loss), grad_norm=str(norm), rows=row_ids)
        raise ConfigError(
            f"loss {loss}, gradient norm {norm} at step {step} (rows {', '.join(map(str, row_ids))}: "
            f"{self.job.where(row_ids)}); {self.checkpoints.good()}. Look at these rows, or lower lr"
        )

    def check_weights(self) -> None:
        """Raise ConfigError, before they are saved or exported, when the last update has spoilt the weights."""
        if not self.trainer.parameters_finite():
            self.log.write("non-finite", step=self.done)
            raise ConfigError(
                f"weights are infinite or NaN after step {self.done}; {self.checkpoints.good()}. Lower lr"
            )

    def evaluate(self) -> float | None:
        """Loss per supervised token of the evaluation rows; None without any. ConfigError when it is not finite."""
        if self.job.eval_loader is None:
            return None
        started, total, count = time.perf_counter(), 0.0, 0
        for batch in self.job.eval_loader.eval_batches():
            self.check_stop()
            result = self.validate(batch)
            total, count = total + result["loss"] * result["tokens"], count + int(result["tokens"])
        if not count:
            raise ConfigError("the evaluation rows have no supervised token; give others (eval-data, eval-fraction)")
        if not math.isfinite(total):
            raise ConfigError(
                f"evaluation loss {total / count} at step {self.done}; {self.checkpoints.good()}. "
                "Look at the model's weights and the evaluation rows, or lower lr"
            )
        self.eval_loss = total / count
        seconds = time.perf_counter() - started
        self.progress.line(
            f"evaluation at step {self.done}: loss {self.eval_loss:.4f} ({count:,} tokens, {seconds:.1f} s)"
        )
        self.log.write("evaluation", step=self.done, loss=self.eval_loss, tokens=count, seconds=seconds)
        return self.eval_loss

    def validate(self, batch: Batch) -> dict[str, float]:
        return self.trainer.validate(batch.inputs, batch.targets, batch.documents)

    def save(self) -> None:
        """A checkpoint of the last completed update, unless there is one."""
        if self.checkpoints.has(self.done):
            return
        self.check_weights()
        state = {
            "position": self.position,
            "inputs": self.job.inputs,
            "eval_loss_before": self.eval_loss_before,
        }
        self.checkpoints.save(self.done, state)

    def end_epoch(self, epoch: int) -> None:
        """adapters/epoch_N, and adapter/ as the newest (a full model is exported once, at the end)."""
        if self.config.method == "lora":
            self.check_weights()
            self.export_adapter(self.directory.path / "adapters" / f"epoch_{epoch}")
            self.export_adapter(self.directory.path / "adapter")

    def export_adapter(self, directory: Path) -> None:
        """A PEFT directory, replacing an older one."""
        self.trainer.export_adapter(directory, overwrite=True)
        self.log.write("export", step=self.done, path=str(directory))

    def interrupted(self) -> str:
        """Save what is complete, and say what that is; the unfinished window is dropped."""
        self.trainer.discard()
        self.save()
        self.checkpoints.finish()
        self.log.write("interrupted", step=self.done)
        kept = f"state of step {self.done} is saved" if self.done else "no update was complete, nothing to save"
        return f"interrupted: {kept}; resume with: fullstride {self.config.command} {self.directory.config_file}"

    @property
    def exported(self) -> Path:
        """Where what was trained ends up."""
        return self.directory.path / ("adapter" if self.config.method == "lora" else "model")

    def finish(self) -> RunResult:
        """The last checkpoint, what was trained, and the loss curve."""
        self.save()
        if self.config.method == "lora":
            self.export_adapter(self.exported)
        else:
            self.trainer.export_model(self.exported, self.config.export_dtype, overwrite=True)
            self.log.write("export", step=self.done, path=str(self.exported))
        self.checkpoints.finish()
        if self.leads:
            plot_loss(self.directory.path, self.eval_loss_before)
        self.log.write("end", step=self.done, loss=self.loss, eval_loss=self.eval_loss)
        self.progress.line(f"done: {self.exported}")
        return self.result()

    def result(self) -> RunResult:
        adapter, model = (self.exported, None) if self.config.method == "lora" else (None, self.exported)
        losses = self.loss, self.eval_loss_before, self.eval_loss
        return RunResult(self.directory.path, self.done, *losses, adapter, model)
