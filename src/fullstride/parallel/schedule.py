"""How layers are dealt to pipeline stages: pure values, printable and tested without processes."""

from __future__ import annotations

from fullstride.errors import ConfigError


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of every stage: contiguous, all of them, counts that differ by at most one (later stages get more,
    since the first also holds the embedding).

    Raises ConfigError with both numbers when a stage would have none.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot be split over {num_stages} pipeline stages; set pp to at most {num_layers}"
        )
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages)]
