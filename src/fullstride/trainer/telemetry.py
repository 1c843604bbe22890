"""What the devices report: GPU telemetry through NVML, and peak memory since the last question."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch

from fullstride.errors import ConfigError
from fullstride.memory.arena import capacity, free_memory

FIELDS = (
    "name",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_watts",
    "temperature_celsius",
    "fan_percent",
    "memory_used_bytes",
    "memory_total_bytes",
    "utilisation_percent",
    "throttle_reasons",
    "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second",
)


def device_info(device: torch.device) -> dict[str, Any]:
    """One record with FIELDS; on a CPU all None, and on a GPU None for what the driver does not tell.

    Raises ConfigError where the package nvidia-ml-py is missing.
    """
    if device.type != "cuda":
        return dict.fromkeys(FIELDS)
    try:
        import pynvml as nvml  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError(
            "GPU telemetry needs the package nvidia-ml-py; install it, or fullstride with extra gpu"
        ) from None
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def ask(call: Any, *args: Any) -> Any:
        try:
            return call(handle, *args)
        except nvml.NVMLError:
            return None  # not every GPU has a fan, not every driver counts PCIe traffic

    power, rx, tx = ask(nvml.nvmlDeviceGetPowerUsage), *(ask(nvml.nvmlDeviceGetPcieThroughput, i) for i in (1, 0))
    memory, load = ask(nvml.nvmlDeviceGetMemoryInfo), ask(nvml.nvmlDeviceGetUtilizationRates)
    values = (
        torch.cuda.get_device_name(device),
        ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        None if power is None else power / 1000,
        ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        ask(nvml.nvmlDeviceGetFanSpeed),
        None if memory is None else memory.used,
        None if memory is None else memory.total,
        None if load is None else load.gpu,
        ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        None if rx is None else rx * 1024,
        None if tx is None else tx * 1024,
    )
    return dict(zip(FIELDS, values, strict=True))


def host_memory() -> tuple[int, int]:
    """(free, all) bytes of memory that this process may have."""
    cpu = torch.device("cpu")
    return free_memory(cpu, 0), capacity(cpu)


class PeakMemory:
    """Bytes at the peak since the last call: of the GPU's allocator, or on a CPU the process's resident set."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self()

    def __call__(self) -> int:
        """The peak since the last call; since the process began where the kernel does not let us reset it (a CPU under
        macOS, or a container without a writable /proc)."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        try:
            status = Path("/proc/self/status").read_text()
            peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if "VmHWM" in line), peak)
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (Linux, proc(5))
        except OSError:
            return peak
        return peak
