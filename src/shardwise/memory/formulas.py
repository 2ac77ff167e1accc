"""Memory formulas of transformers from papers; tests compare them with exact counts."""

from __future__ import annotations


def transformer_model_bytes(layers: int, hidden: int, *, itemsize: int = 4) -> int:
    """Return the parameter bytes of a transformer's layers, 4 * layers * hidden * (13 + 12 * hidden) in fp32.

    A layer has query, key, value and output projections (4h^2 + 4h), a feed-forward network of four times the width
    (8h^2 + 5h), and two layer norms (4h). Embeddings and a final norm are excluded.

    >>> transformer_model_bytes(12, 768)
    340217856
    """
    return itemsize * layers * hidden * (13 + 12 * hidden)


def transformer_activation_bytes(layers: int, hidden: int, heads: int, batch: int, length: int) -> int:
    """Return the estimated saved activations of an fp32 transformer: n*b*l*h * (67 + 9*m*l / h) bytes.

    Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022, arXiv:2205.05198, section
    4.1), count 34*b*l*h + 5*b*m*l^2 bytes in each of n layers in 16 bits, including dropout masks of one byte a value
    (width h, m heads, b sequences of l tokens). In fp32 all but the masks double: 66*b*l*h + 9*b*m*l^2. The common form
    with 67 counts one of two masks as doubled. The formula holds for attention with materialized scores and dropout;
    fused attention does not save scores.

    >>> transformer_activation_bytes(12, 768, 12, 8, 1024)
    15929966592
    """
    return layers * batch * length * (67 * hidden + 9 * heads * length)
