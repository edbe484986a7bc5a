"""The shape of a transformer: the few numbers from which its size, work and memory follow.

Decoders (GPT, Llama, Mixtral, DeepSeek), encoders (BERT) and ViT are one kind of thing here; what
differs is said by a field, never by a name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vectors:
    """Parameters of norms, biases and what else is no matrix of the shape, counted one by one.

    Attributes:
        embedding, head: once, beside the table of words and the product with it.
        attention: of a block: all its norms, and the biases of its attention.
        ffn: of a block without experts: the biases of its ffn.
        router, expert: of a block with experts, beside the router's matrix; of each expert.
    """

    embedding: int = 0
    attention: int = 0
    ffn: int = 0
    router: int = 0
    expert: int = 0
    head: int = 0


@dataclass(frozen=True)
class Transformer:
    """The shape of a transformer: one stack of equal blocks between an embedding and a head.

    hidden h, heads a, kv_heads, head_size (0: h / a; a·head_size may differ from h), ffn f

    Attributes:
        vocabulary: tokens (ViT: classes).
        positions: learned position embeddings, 0 for rotary.
        context: longest sequence that the model was made for, 0 where that is not known.
        patch: ViT: numbers per patch (3·16·16), embedded by a matrix instead of a table; else 0.
        gated: SwiGLU-like (three matrices) or plain (two).
        norm: "rms" or "layer".
        tied: the head has the embedding's weights.
        biases: of linear layers.
        window: tokens that attention looks back on, 0: all.
        causal: none looks ahead.
        experts: routed experts per block, 0 for none; expert_ffn is one's width, experts_per_token
            are used, shared_ffn is the width of what every token uses beside them.
        latent: (q, kv, rope) ranks of multi-head latent attention; () for ordinary attention. A
            fourth number is a head's width without positions, where values have another.
        vectors: norms and biases counted one by one; None: as `norm` and `biases` say.

    dense_layers blocks of an expert model that have a plain ffn, counted as the first ones
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
    causal: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: tuple[int, ...] = ()
    context: int = 0
    vectors: Vectors | None = None

    @property
    def head_width(self) -> int:
        """Numbers per head.

        >>> Transformer("t", 2, 64, 4, 2, 128, 100).head_width
        16
        """
        return self.head_size or self.hidden // self.heads
