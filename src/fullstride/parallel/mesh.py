"""Who trains what together: pp x dp x tp ranks (pipeline stages, rows, slices of a layer), and their communicators.

Rank (p * dp + d) * tp + t is slice t of stage p for rows d: neighbours, which are the closest GPUs, share layers. These
are torch.distributed's process groups, but not its DeviceMesh, whose groups belong to the process's one default group:
here several trainers can live side by side (parallel/comm).
"""

from __future__ import annotations

import torch

from fullstride.parallel.comm import Communicator

FORWARD, BACKWARD = "forward", "backward"  # flows between stages: activations and gradients


class Mesh:
    """This rank's place among all of `world`, and the communicators of those it shares something with.

    dp: same stage and slice, other rows. pp: same rows and slice, other stages, by stage. tp: same stage and rows.
    model: same rows, so all that make up one model. ends: first and last stage of pp, which both hold tied embeddings.
    """

    def __init__(self, world: Communicator | None = None, pp: int = 1, tp: int = 1, wraps: bool = False) -> None:
        """wraps: the last rank of a pipeline sends to the first (interleaved schedules). A collective."""
        self.world = world = world or Communicator()
        assert world.size % (pp * tp) == 0, "pp x dp x tp ranks"
        dp, self._number = world.size // (pp * tp), world.divide()
        p, d, t = world.rank // (dp * tp), world.rank // tp % dp, world.rank % tp

        def ranks(stages: range, rows: range, slices: range) -> list[int]:
            return [(stage * dp + row) * tp + piece for stage in stages for row in rows for piece in slices]

        def group(name: str, stages: range, rows: range, slices: range) -> Communicator:
            return world.subset(f"{self._number} {name}", ranks(stages, rows, slices))

        def one(i: int) -> range:
            return range(i, i + 1)

        self.dp = group(f"dp {p} {t}", one(p), range(dp), one(t))
        self.pp = group(f"pp {d} {t}", range(pp), one(d), one(t))
        self.tp = group(f"tp {p} {d}", one(p), one(d), range(tp))
        self.model = group(f"model {d}", range(pp), one(d), range(tp))
        line = ranks(range(pp), one(d), one(t))
        self.ends = Communicator()
        if pp > 1 and p in (0, pp - 1):
            self.ends = world.subset(f"{self._number} ends {d} {t}", [line[0], line[-1]])
        self._links: dict[tuple[int, int, str], Communicator] = {}
        edges = [(i, (i + 1) % pp) for i in range(pp if wraps else pp - 1)] if pp > 1 else []
        for flow in (FORWARD, BACKWARD):  # in one order on all ranks
            for a, b in edges:
                source, target = (a, b) if flow == FORWARD else (b, a)
                if p in (source, target):
                    self._connect(source, target, flow, line, f"{self._number} {flow} {source} {target} {d} {t}")

    def _connect(self, source: int, target: int, flow: str, line: list[int], name: str) -> None:
        """A group of their own for two stages and one flow, so that its messages wait for no others; the first makes
        the connection, which both sides' hosts must come to."""
        link = self.world.subset(name, [line[source], line[target]], own=True)
        self._links[source, target, flow] = link
        if not self.world.met:
            return
        probe = torch.zeros(1, device=self.world.device)
        (link.send(probe) if self.pp.rank == source else link.receive(probe)).wait()

    def link(self, source: int, target: int, flow: str) -> Communicator:
        """Between this rank's stages and another rank's, both by their place in pp."""
        return self._links[source, target, flow]

    def close(self) -> None:
        """Leave the groups that are the mesh's own."""
        for comm in {self.dp, self.pp, self.tp, self.model, self.ends, *self._links.values()} - {self.world}:
            comm.close()
