"""Files with weights: how often each document comes in an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fullstride.errors import UsageError

MOST_DOCUMENTS = 10**7  # of an epoch


def mix(
    names: Sequence[str], counts: Sequence[int], weights: Sequence[float], seed: int
) -> tuple[list[np.ndarray], list[str]]:
    """For each file the numbers of its documents that an epoch has (int64), and a line of words about it.

    `counts` are the files' documents, at least one each; `weights` are their shares of an epoch, up to a factor. An
    epoch is as long as it must be for every document to come at least once: one file's come exactly once. A file of n
    documents that gives m of them gives each m // n times, and m % n of them, drawn by a generator keyed by `seed` and
    the file's place, once more. Raises UsageError where an epoch would have too many.
    """
    shares = np.array(weights, dtype=np.float64) / np.max(weights)
    shares = np.maximum(shares / shares.sum(), 1e-250)
    sizes = np.array(counts) / shares
    total = float(sizes.max())
    if not total <= MOST_DOCUMENTS:
        name = names[int(sizes.argmax())]
        raise UsageError(
            f"data: with these weights an epoch would have {total:,.0f} documents, since each one of {name} comes at "
            f"least once (at most {MOST_DOCUMENTS:,}); raise its weight"
        )
    gives = [max(count, round(float(share) * total)) for count, share in zip(counts, shares, strict=True)]
    chosen, notes = [], []
    for place, (name, count, give) in enumerate(zip(names, counts, gives, strict=True)):
        times, extra = divmod(give, count)
        # NumPy promises the same raw bits in all releases, but not the same choice()
        noise = np.random.PCG64([seed, place]).random_raw(count)
        drawn = np.sort(np.argsort(noise, kind="stable")[:extra])
        chosen.append(np.concatenate([np.tile(np.arange(count), times), drawn]))
        often = f"{times} or {times + 1} times" if extra else "once" if times == 1 else f"{times} times"
        part = 100 * give / sum(gives)
        notes.append(f"{name}: {count:,} documents, each {often} an epoch ({part:.1f} % of all)")
    return chosen, notes
