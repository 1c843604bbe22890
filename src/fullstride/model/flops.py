"""Model FLOPs of a block and of the head, by pass: what a step needs, recomputation not counted (PaLM's model FLOPs,
arXiv 2204.02311, appendix B).

Each weight of a matrix product costs 2 FLOPs a token in the forward, the input gradient and the weight gradient; a
frozen weight has no weight gradient. Causal attention costs 2 * n^2 * H * E a layer in the forward and twice that in
the backward, which is for the input, for a document of n tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fullstride.model.spec import ModelConfig


class Passes(NamedTuple):
    """FLOPs of the forward, of the backward for the input, and of the backward for the weights."""

    forward: float
    for_input: float
    for_weights: float


def lora_parameters(config: ModelConfig, rank: int, targets: Iterable[str]) -> int:
    """Elements of one layer's adapters: R * (inputs + outputs) for each target."""
    width, ffn = config.hidden_size, config.intermediate_size
    sizes = {
        "q_proj": (width, config.q_size),
        "k_proj": (width, config.kv_size),
        "v_proj": (width, config.kv_size),
        "o_proj": (config.q_size, width),
        "gate_proj": (width, ffn),
        "up_proj": (width, ffn),
        "down_proj": (ffn, width),
    }
    return rank * sum(sum(sizes[target]) for target in targets)


def layer_flops(config: ModelConfig, adapters: int | None, tokens: int, squared_lengths: int) -> Passes:
    """Of one layer. adapters: their elements (`lora_parameters`), None where the weights themselves train;
    squared_lengths: the sum of n^2 over the documents that make up the tokens."""
    weights = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    trained = weights if adapters is None else adapters
    products = 2 * (weights + (adapters or 0)) * tokens
    attention = 2 * config.q_size * squared_lengths
    return Passes(products + attention, products + 2 * attention, 2 * trained * tokens)


def head_flops(config: ModelConfig, trains: bool, tokens: int) -> Passes:
    """Of the LM head; `trains`: its weights do."""
    product = 2 * config.vocab_size * config.hidden_size * tokens
    return Passes(product, product, product if trains else 0)
