"""`fullstride doctor`."""

from fullstride.config.commands import DoctorConfig as Config

SUMMARY = "what this machine offers for training, and what is missing"
POSITIONAL = ()


def run(config: Config) -> int:
    """Look and tell; status 1 where training cannot run."""
    from fullstride.run.doctor import FAULT, run_doctor

    return int(any(finding.level == FAULT for finding in run_doctor(config)))
