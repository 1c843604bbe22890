"""Tensor parallelism: each rank has a share of every linear, of every head, and of the vocabulary.

Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). qkv and gate_up are split by rows of W, that is by their outputs;
o and down by columns, that is by their inputs. So between the two of a pair a rank works on its own heads, or its own
part of the feed-forward width, and nothing is exchanged. What comes out of o and down is a term of a sum over ranks,
and so is, in the backward, what comes out of qkv's and gate_up's input gradients:

    plain       the residual stream is whole on every rank; sums are all-reduced
    sequence    a rank keeps N / tp rows of it (Korthikanti et al. 2022, arXiv 2205.05198) and normalises those: sums
                are reduce-scattered, and what the norms give, or o's and down's output gradients, is all-gathered

The block does not know which: it calls `summed` and `gather`, which move nothing where there is one rank. To overlap
them with products, cut those by rows and start each piece's collective as it is done: all of it lies behind these two.

An adapter's A has W's inputs and its B W's outputs, so one of them is split as W is and the other is whole on every
rank. u of o and down, and du of qkv and gate_up, are terms of sums too. But all that reads them is linear, so nothing
is exchanged for them: their share of y and dx is summed with the rest, and gradients of what is whole on every rank are
terms which one small sum an update completes (engine/split).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig, TensorSpec


class Scratch(Protocol):
    """Gives buffers that live until their name is taken again."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


def _nobody(*_: torch.Tensor) -> None:
    raise AssertionError("one rank has nobody to talk to")


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of the `size` that share a model's tensors, and what they say to one another, on contiguous tensors:

    all_reduce(x) overwrites x with the sum over ranks, the same bits on each; all_gather(part, whole) overwrites whole
    with the ranks' parts in their order, and reduce_scatter(whole, part) part with the sum of piece `rank` of whole;
    part may be that piece of whole. sequence: the form in which the residual stream is shared by rows.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], None] = _nobody
    all_gather: Callable[[torch.Tensor, torch.Tensor], None] = _nobody
    reduce_scatter: Callable[[torch.Tensor, torch.Tensor], None] = _nobody
    sequence: bool = False

    @property
    def row_shares(self) -> int:
        """Ranks among which the rows of the residual stream are shared."""
        return self.size if self.sequence else 1

    def own(self, whole_ND: torch.Tensor) -> torch.Tensor:
        """The rows of whole_ND that this rank keeps of the residual stream: all, or N / tp."""
        rows = whole_ND.shape[0] // self.row_shares
        first = self.rank * rows if self.sequence else 0
        return whole_ND[first : first + rows]

    def summed(self, term_ND: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' term_ND (contiguous), in place: the others hold nothing then."""
        own = self.own(term_ND)
        if self.sequence:
            self.reduce_scatter(term_ND, own)
        elif self.size > 1:
            self.all_reduce(term_ND)
        return own

    def gather(self, whole_ND: torch.Tensor, scratch: Scratch) -> None:
        """Every rank has written its `own` rows of whole_ND, whose rows may be strided: fill in the others'."""
        if not self.sequence:
            return
        whole = whole_ND
        if not whole_ND.is_contiguous():
            whole = scratch("gathered_rows", tuple(whole_ND.shape), whole_ND.dtype)
            self.own(whole).copy_(self.own(whole_ND))
        self.all_gather(self.own(whole), whole)
        if whole is not whole_ND:
            whole_ND.copy_(whole)


ALONE = TensorParallel()


# ---- sizes


def vocabulary_part(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary that each of `size` ranks has place for; the last one's need not all be in use."""
    return -(-vocab_size // size)


def vocabulary_of(vocab_size: int, tp: TensorParallel) -> range | None:
    """The tokens that this rank has; None: all."""
    part = vocabulary_part(vocab_size, tp.size)
    return range(tp.rank * part, min((tp.rank + 1) * part, vocab_size)) if tp.size > 1 else None


def split_config(c: ModelConfig, size: int) -> ModelConfig:
    """The sizes of one rank's share of `c`: heads, feed-forward width and vocabulary divided by `size`, the last
    rounded up. Raises ConfigError, with the nearest size that works, where they cannot be."""
    if not _divides(c, size):
        most = min(c.num_key_value_heads, c.vocab_size)
        nearest = min((t for t in range(1, most + 1) if _divides(c, t)), key=lambda t: (abs(t - size), t))
        raise ConfigError(
            f"tp {size} must divide num_attention_heads {c.num_attention_heads}, num_key_value_heads "
            f"{c.num_key_value_heads} (key/value heads are not replicated) and intermediate_size "
            f"{c.intermediate_size}, and leave each rank a part of the vocabulary {c.vocab_size}; set tp to {nearest}"
        )
    return replace(
        c,
        num_attention_heads=c.num_attention_heads // size,
        num_key_value_heads=c.num_key_value_heads // size,
        intermediate_size=c.intermediate_size // size,
        vocab_size=vocabulary_part(c.vocab_size, size),
    )


def _divides(c: ModelConfig, size: int) -> bool:
    divided = c.num_attention_heads, c.num_key_value_heads, c.intermediate_size
    return not any(n % size for n in divided) and vocabulary_part(c.vocab_size, size) * (size - 1) < c.vocab_size


# ---- tensors


class Share(NamedTuple):
    """One checkpoint tensor's share: elements `own` of a rank's tensor are `whole` of the unsplit tensor, and `part` of
    the checkpoint's tensor hf_name."""

    hf_name: str
    own: tuple[slice, ...]
    whole: tuple[slice, ...]
    part: tuple[slice, ...]


def shares(own: TensorSpec, whole: TensorSpec, rank: int) -> Iterator[Share]:
    """Where the parts of `own`, of the sizes of `split_config`, lie in `whole`, the same tensor unsplit. A part of the
    vocabulary that is padded has its rows in use only."""
    columns = [slice(0, n) for n in own.shape[1:]]
    places = [slice(rank * n, (rank + 1) * n) for n in own.shape[1:]] if own.split == 1 else columns
    for mine, its in zip(own.parts, whole.parts, strict=True):
        size, most = mine.stop - mine.start, its.stop - its.start
        first = rank * size if own.split == 0 else 0
        count = min(size, most - first)
        yield Share(
            mine.hf_name,
            (slice(mine.start, mine.start + count), *columns),
            (slice(its.start + first, its.start + first + count), *places),
            (slice(first, first + count), *places),
        )
