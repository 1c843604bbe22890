"""What this machine offers for training, and what is missing and how to get it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fullstride.config import FLASH4_VERSION, LEAST_CAPABILITY
from fullstride.config.commands import DoctorConfig
from fullstride.files import replace_text
from fullstride.run.metrics import GIGABYTE
from fullstride.version import __version__

OK, NOTE, FAULT = "ok", "note", "fault"  # a fault keeps training from running here
MARKS = {OK: "+", NOTE: "-", FAULT: "!"}
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
REQUIRED = ("numpy", "safetensors", "transformers", "jinja2", "rich")
# extra -> (distribution, what it is for)
EXTRAS = {
    "gpu": ("nvidia-ml-py", "GPU telemetry: clocks, power, temperature"),
    "hub": ("datasets", "data sets of the Hub, Parquet"),
    "plot": ("matplotlib", "loss.png and fullstride plot"),
    "demo": ("gguf", "fullstride import-gguf"),
    "flash4": ("flash-attn-4", f"faster attention on Hopper GPUs; tested: {FLASH4_VERSION}"),
    "log": ("tensorboard", "--log tensorboard (wandb and trackio come with it)"),
}


@dataclass(frozen=True)
class Finding:
    """One line: what it is about, what was found, and, where something is missing, what to do."""

    level: str
    about: str
    found: str
    remedy: str = ""


def run_doctor(config: DoctorConfig) -> list[Finding]:
    """Look, print what was found, and return it. Nothing that is broken here raises: it is a finding."""
    findings = list(examine())
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        print(f"{MARKS[finding.level]} {finding.about:<{width}}  {finding.found}{remedy}")
    faults = sum(finding.level == FAULT for finding in findings)
    print(f"training cannot run here: {faults} fault(s), marked !" if faults else "training can run here")
    if config.json:
        replace_text(Path(config.json), json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    return findings


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are shown."""
    yield from _software()
    for about, look in (
        ("GPUs", _gpus),
        ("links", _links),
        ("processes", _processes),
        ("memory", _memory),
        ("disk", _disk),
    ):
        yield from _guarded(about, look)
    yield from _extras()


def _guarded(about: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # half-broken drivers and packages raise whatever they like: that is the finding
        yield Finding(NOTE, about, f"cannot be told ({type(error).__name__}: {' '.join(str(error).split())[:200]})")


def _installed(name: str) -> str:
    """The version of a distribution; "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _software() -> Iterator[Finding]:
    yield Finding(OK, "fullstride", __version__)
    told = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info[:2] >= LEAST_PYTHON
    yield Finding(OK if good else FAULT, "Python", told, "" if good else "install Python 3.11 or newer")
    yield from _guarded("torch", _torch)
    for name in REQUIRED:
        found = _installed(name)
        remedy = "" if found else f"pip install {name}"
        yield Finding(OK if found else FAULT, name, found or "missing", remedy)


def _torch() -> Iterator[Finding]:
    found = _installed("torch")
    least = ".".join(map(str, LEAST_TORCH))
    if not found:
        yield Finding(FAULT, "torch", "missing", f"pip install 'torch>={least}'")
        return
    if _numbers(found) < LEAST_TORCH:
        yield Finding(FAULT, "torch", found, f"{least} is the least: pip install --upgrade torch")
        return
    try:
        import torch
    except Exception as error:  # a wheel for another CUDA or another machine
        yield Finding(FAULT, "torch", f"{found} does not import ({error})", "install it again for this machine")
        return
    yield Finding(OK, "torch", f"{found}, CUDA {torch.version.cuda or 'none (a build for CPUs)'}")


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
        if not driver:
            yield Finding(NOTE, "GPUs", "none: training runs on the CPU, which is slow")
        elif torch.version.cuda is None:
            yield Finding(NOTE, "GPUs", "there is a driver, but torch is a build for CPUs", "install torch with CUDA")
        else:
            yield Finding(NOTE, "GPUs", "there is a driver, but torch sees none", "look at nvidia-smi: is it too old?")
        return
    triton = _installed("triton")
    yield Finding(OK if triton else FAULT, "triton", triton or "missing", "" if triton else "pip install triton")
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        told = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB free"
        )
        good = (properties.major, properties.minor) >= LEAST_CAPABILITY
        remedy = "" if good else "8.0 (Ampere) is the least: --device cpu"
        yield Finding(OK if good else NOTE, f"GPU {number}", told, remedy)


def _links() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count if count > 1 else 0):
        peers = [p for p in range(count) if p != number and torch.cuda.can_device_access_peer(number, p)]
        missing = [str(p) for p in range(count) if p != number and p not in peers]
        told = f"reaches {', '.join(map(str, peers)) or 'no other GPU'} directly{_nvlinks(number)}"
        remedy = f"not {', '.join(missing)}: gather-by and send-by = copy fall to NCCL" if missing else ""
        yield Finding(NOTE if missing else OK, f"GPU {number} links", told, remedy)


def _nvlinks(number: int) -> str:
    """How many NVLinks of a GPU are up, where the driver tells."""
    try:
        import pynvml as nvml  # type: ignore[import-not-found]
        import torch

        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        handle, up = nvml.nvmlDeviceGetHandleByUUID(uuid), 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                up += nvml.nvmlDeviceGetNvLinkState(handle, link) == 1
            except nvml.NVMLError:
                break
    except Exception:  # the package is missing, or a driver that does not tell
        return ""
    return f", {up} NVLinks up" if up else ", no NVLink"


def _processes() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(NOTE, "several ranks", "this torch has no torch.distributed", "install another build")
        return
    names = [n for n, there in (("Gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if there]
    yield Finding(OK if names else NOTE, "several ranks", f"over {' and '.join(names) or 'nothing'}")


def _memory() -> Iterator[Finding]:
    from fullstride.trainer.telemetry import host_memory

    free, total = host_memory()
    told = f"{free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB free, {os.cpu_count()} CPU cores"
    yield Finding(OK, "memory", told)


def _disk() -> Iterator[Finding]:
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    for about, place in (("disk here", Path.cwd()), ("Hub cache", cache), ("/dev/shm", Path("/dev/shm"))):
        there = next(path for path in (place, *place.parents) if path.exists())
        usage = shutil.disk_usage(there)
        told = f"{place}: {usage.free / GIGABYTE:.1f} of {usage.total / GIGABYTE:.1f} GB free"
        writable = os.access(there, os.W_OK)
        level = OK if (writable and usage.free > GIGABYTE) or about == "/dev/shm" else NOTE
        yield Finding(level, about, told, "" if writable else "no permission to write there")


def _extras() -> Iterator[Finding]:
    for extra, (package, use) in EXTRAS.items():
        found = _installed(package)
        remedy = "" if found else f"pip install 'fullstride[{extra}]'"
        yield Finding(OK if found else NOTE, f"extra {extra}", f"{package} {found or 'missing'} ({use})", remedy)
