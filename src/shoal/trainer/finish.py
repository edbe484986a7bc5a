"""The end of a run: a sample of what the model writes, and how the run went."""

from __future__ import annotations

import math

import torch

from shoal.data.sources import Source
from shoal.models.llama import Llama
from shoal.trainer.run import Run

PROMPT = "def "
SAMPLE_TOKENS = 96


def finish(
    run: Run, source: Source, values: dict[str, float] | None, *, steps: int, wall_s: float
) -> None:
    """Emit the last events of a run that reached its end; rank 0 speaks.

    values   of the last validation, or None without held-out data
    """
    # Where parameters are gathered, a forward pass is everybody's.
    text = sample(run, source) if run.world.is_first or run.program.together else None
    if not run.world.is_first:
        return
    emit = run.recorder.events.emit
    if text is not None:
        emit("notice", step=run.step_count, text=f"a sample of what it writes:\n{text}")
    emit(
        "run_finished",
        step=run.step_count,
        how="completed",
        steps_here=steps,
        wall_s=wall_s,
        validation_loss=_finite(values["loss"]) if values else None,
    )


def sample(run: Run, source: Source) -> str | None:
    """Text that the model continues from `def `; None for models that do not write text.

    None under tp, cp and pp too: every new length would be traced, or cross all stages.
    """
    program, tokenizer = run.program, source.tokenizer
    plain = max(program.pipe.size, program.tensor.size, program.context.size) == 1
    if tokenizer is None or not isinstance(run.model, Llama) or not plain:
        return None
    from shoal.models.generate import generate

    prompt = torch.tensor([tokenizer.encode(PROMPT).ids], device=run.world.device)
    generator = torch.Generator(device=run.world.device).manual_seed(run.settings.seed)
    with run.program.autocast():
        tokens = generate(
            run.model,
            prompt,
            steps=SAMPLE_TOKENS,
            temperature=0.7,
            generator=generator,
            window=run.model.sequence,
        )
    return tokenizer.decode(tokens[0].tolist())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
