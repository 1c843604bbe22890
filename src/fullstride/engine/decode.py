"""Generation, one token after another, over a key/value cache: the training block with another `attend`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from fullstride.engine.state import Precision
from fullstride.engine.step import Engine, EngineSettings, make_rope
from fullstride.engine.weights_io import import_adapter, import_weights
from fullstride.errors import ConfigError
from fullstride.memory.arena import Arena, Scratch
from fullstride.memory.saved import Saved, SavedBuffers
from fullstride.model.block import BlockContext, block_fwd
from fullstride.model.linear import LinearContext
from fullstride.model.lora import read_peft_config
from fullstride.model.spec import ModelConfig
from fullstride.ops.attention import Documents
from fullstride.ops.embedding import embedding_fwd
from fullstride.ops.matmul import matmul
from fullstride.ops.rms_norm import rms_norm_fwd

GROW = 256  # positions by which the cache and the rotary tables grow


class Decoder:
    """Next-token logits of one sequence. `logits(ids)` continues it; `reset()` starts another."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.config
        self._arena = Arena(engine.device)
        self._scratch = Scratch(self._arena)
        self._rng = torch.zeros(4, dtype=torch.int64, device=engine.device)
        shape = (0, self.config.num_key_value_heads, self.config.head_dim)
        empty = torch.zeros(shape, dtype=engine.dtype, device=engine.device)
        self._cache = [(empty, empty)] * self.config.num_hidden_layers
        self._written: Saved | None = None
        self.length = 0

    @classmethod
    @torch.no_grad()
    def from_pretrained(
        cls, model: str | Path, adapter: str | Path | None, dtype: torch.dtype, device: torch.device
    ) -> Decoder:
        """A decoder of the model (and PEFT adapter) in these directories; nothing is kept for training."""
        lora = None if adapter is None else read_peft_config(adapter)
        precision = Precision(dtype, None, dtype, dtype)
        settings = EngineSettings(1, 1, precision, head_chunks=1, trains=False)
        engine = Engine(ModelConfig.from_pretrained(model), lora, settings, device)
        import_weights(engine, model)
        if adapter is not None:
            import_adapter(engine, adapter)
        return cls(engine)

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Feed `ids` after what is cached; float32 (or float64) [V] logits of the token after the last.

        Raises ConfigError for no ids or an id outside the vocabulary.
        """
        c, engine = self.config, self.engine
        bad = [i for i in ids if not 0 <= i < c.vocab_size]
        if not ids or bad:
            raise ConfigError(f"token ids must be one or more numbers below {c.vocab_size}, got {(bad or ids)[:3]}")
        n, start = len(ids), self.length
        self._reserve(start + n)
        tokens = torch.tensor(ids, dtype=torch.int32, device=engine.device)
        positions = torch.arange(start, start + n, dtype=torch.int32, device=engine.device)
        s = self._buffers(n)
        documents = Documents(positions[:0], 1, n, packed=False)  # unused: `attend` is ours
        residual, branch = s["x"], None
        embedding_fwd(engine.state.weights.get("embedding")["embedding"], tokens, residual)
        for layer in range(c.num_hidden_layers):
            ctx = BlockContext(
                c,
                LinearContext(matmul, self._scratch, self._rng, training=False),
                self._rope,
                positions,
                documents,
                lambda q, k, v, layer=layer: (self._attend(layer, start, q, k, v), ()),
            )
            residual, branch = block_fwd(engine.tools.block(layer), s, ctx, residual, branch)
        self.length = start + n
        assert branch is not None
        return self._last_logits(residual[-1:], branch[-1:])

    def _buffers(self, n: int) -> Saved:
        """What the layers write for n tokens; kept for the next call, which usually has one token too."""
        if self._written is None or len(self._written["x"]) != n:
            arena = Arena(self.engine.device)
            self._written = SavedBuffers(self.engine.saved_table, n, frozenset(), arena, self.engine.dtype).layer()
        return self._written

    def _attend(
        self, layer: int, start: int, q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the new queries over the cache, to which the new keys and values are added."""
        n = len(q_NHE)
        keys, values = self._cache[layer]
        keys[start : start + n], values[start : start + n] = k_NKE, v_NKE
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHE, keys[: start + n], values[: start + n]))
        # one new token sees everything; tokens after others need a mask, which is not square
        seen = None if n == 1 or not start else torch.ones(n, start + n, dtype=torch.bool, device=q.device).tril(start)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=n > 1 and not start, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()

    def _last_logits(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        head = self.engine.tools.head(self.engine.state.weights.get)
        assert head.final_norm is not None and head.lm_head is not None
        x, normed = torch.empty_like(residual), torch.empty_like(residual)
        rstd = torch.empty(1, dtype=self._rope.cos.dtype, device=x.device)
        rms_norm_fwd(residual, branch, head.final_norm, self.config.rms_norm_eps, x, normed, rstd)
        logits = torch.empty(1, self.config.vocab_size, dtype=x.dtype, device=x.device)
        matmul(normed, head.lm_head.t(), logits)
        return logits[0].to(rstd.dtype)

    def _reserve(self, length: int) -> None:
        """Make room for `length` positions in the cache and the rotary tables."""
        held = len(self._cache[0][0])
        if length <= held:
            return
        size = -(-length // GROW) * GROW

        def grown(old: torch.Tensor) -> torch.Tensor:
            new = torch.zeros((size, *old.shape[1:]), dtype=old.dtype, device=old.device)
            new[: self.length] = old[: self.length]
            return new

        self._cache = [(grown(keys), grown(values)) for keys, values in self._cache]
        wide = torch.float64 if self.engine.dtype == torch.float64 else torch.float32
        self._rope = make_rope(self.config, size, Arena(self.engine.device), wide)
