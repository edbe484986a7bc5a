"""MFU and HFU: the share of a machine's peak FLOP/s that a training step uses.

    FLOP per token   6·N + 12·L·h·s        N parameters in matrices, L blocks, h hidden, s sequence
    MFU              tokens/s · FLOP per token / (devices · peak)
    HFU              MFU · (1 + recomputed share): 4/3 for full recompute

6·N: a multiplication and an addition per weight, forward, and twice that backward. 12·L·h·s:
queries times keys and scores times values; the whole square, as PaLM and torchtitan count, though a
causal mask leaves half of it. The peak is the DENSE one of the format: 989 TFLOP/s for bf16 on an
H100 SXM, not 1979, which is for sparse matrices. MFU counts what the model needs, HFU what ran.
Sources: PaLM (Chowdhery et al. 2022), appendix B; torchtitan `get_num_flop_per_token`; Narayanan et
al. 2021 for the FLOP of a step.
"""

from __future__ import annotations

from shoal.base.errors import PlanError


def flops_per_token(parameters: float, layers: int, hidden: int, sequence: int) -> float:
    """Return the FLOP of forward and backward for one token, without recompute.

    Llama-3-8B at 8192 tokens (8.03e9 parameters, 32 blocks of 4096): a quarter is attention.

    >>> flops_per_token(8.03e9, 32, 4096, 8192) / 1e9
    61.064901888
    """
    return 6 * parameters + 12 * layers * hidden * sequence


def recompute_factor(recompute: str, parameters: float, attention: float) -> float:
    """Return FLOP run per FLOP needed: `none` 1, `full` 4/3, `selective` attention's forward again.

    Args:
        parameters, attention: FLOP per token of the two terms of `flops_per_token`.

    Raises:
        PlanError: another word.

    >>> recompute_factor("full", 48.0, 12.0), recompute_factor("selective", 48.0, 12.0)
    (1.3333333333333333, 1.0666666666666667)
    """
    if recompute == "none":
        return 1.0
    if recompute == "full":
        return 4 / 3
    if recompute == "selective":
        return 1 + attention / 3 / (parameters + attention)
    raise PlanError(
        f"recompute = {recompute}: not one of none, selective, full; try: recompute=none"
    )


def mfu(tokens_per_s: float, flops_token: float, devices: int, peak_flops_per_s: float) -> float:
    """Return MFU, the share of the peak that the model's own FLOP take.

    Raises:
        PlanError: no devices or no peak.

    Llama-3-405B ran at 400 TFLOP/s per H100 on 16 384: 40 % of 989.

    >>> round(mfu(400e12 * 16384 / 2.6e12, 2.6e12, 16384, 989e12), 3)
    0.404
    """
    if devices < 1 or peak_flops_per_s <= 0:
        raise PlanError(
            f"gpus = {devices}, peak = {peak_flops_per_s:g} FLOP/s: both must be more than 0; "
            f"try: gpus=1 peak_tflops=989"
        )
    return tokens_per_s * flops_token / (devices * peak_flops_per_s)
