"""Shape of a transformer: the numbers that determine its size, FLOP and memory.

Decoders (GPT, Llama, Mixtral, DeepSeek), encoders (BERT) and ViT share one class; a field, never a
name, states a difference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VectorParameterCounts:
    """Parameter counts of norms and biases, and of others outside the shape's matrices.

    Attributes:
        embedding, head: once per model, in addition to the embedding table and the head's matrix.
        attention: per block: all its norms, and the biases of its attention.
        ffn: per block without experts: the biases of its ffn.
        router, expert: per block with experts, in addition to the router's matrix; per expert.
    """

    embedding: int = 0
    attention: int = 0
    ffn: int = 0
    router: int = 0
    expert: int = 0
    head: int = 0


@dataclass(frozen=True)
class TransformerShape:
    """Shape of a transformer: one stack of equal blocks between an embedding and a head.

    hidden h, heads a, kv_heads, head_size (0: h / a; a·head_size may differ from h), ffn f

    Attributes:
        vocabulary: tokens (ViT: classes).
        positions: learned position embeddings, 0 for rotary.
        context: longest sequence that the model supports, 0 if unknown.
        patch: ViT: numbers per patch (3·16·16), embedded by a matrix instead of a table; else 0.
        gated: SwiGLU-like (three matrices) or plain (two).
        norm: "rms" or "layer".
        tied: the head has the embedding's weights.
        biases: linear layers have biases.
        window: earlier tokens that attention sees, 0: all; in all blocks but full_layers of them.
        causal: no token attends to later ones.
        experts: routed experts per block, 0 for none; expert_ffn is the width of one,
            experts_per_token are active, shared_ffn is the width of the shared expert.
        latent: (q, kv, rope) ranks of multi-head latent attention; () for ordinary attention. A
            fourth number is a head's width without positions, where values have another.
        vectors: exact counts of norms and biases; None: derived from `norm` and `biases`.

    `dense_layers` counts the blocks of an expert model with a plain ffn, the first ones.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_size: int = 0
    positions: int = 0
    patch: int = 0
    gated: bool = True
    norm: str = "rms"
    tied: bool = False
    biases: bool = False
    dropout: float = 0.0
    window: int = 0
    full_layers: int = 0
    causal: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: tuple[int, ...] = ()
    context: int = 0
    vectors: VectorParameterCounts | None = None

    @property
    def head_width(self) -> int:
        """Width of one attention head.

        >>> TransformerShape("t", 2, 64, 4, 2, 128, 100).head_width
        16
        """
        return self.head_size or self.hidden // self.heads
