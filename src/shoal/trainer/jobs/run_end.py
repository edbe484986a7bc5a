"""End of a run: a sample of the model's text, and the event `run_finished`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from shoal.base.errors import shorten
from shoal.base.runlog.damaged_lines import replace_non_finite
from shoal.data.sources import Source
from shoal.machine.device_pool import describe_pool, read_device_pool
from shoal.models.llama import Llama
from shoal.trainer.run import Run
from shoal.wire.phases import iter_with_progress, phase

PROMPT = "def "
SAMPLE_TOKENS, AT_ONCE = 96, 8
SAMPLE_S = 2.0
"""Seconds that a run may spend on its sample; large models generate less text in them."""


@phase("finish")
def emit_run_end(
    run: Run,
    source: Source,
    values: dict[str, float] | None,
    *,
    steps: int,
    wall_s: float,
    how: str = "completed",
) -> None:
    """Emit the last events of a run that reached its end; ranks that own a disk write them.

    Args:
        values: of the last validation, or None without held-out data.
        how: "completed"; after a ";" what went wrong.
    """
    run.guards.untrained.close()
    text = _try_sample(run, source)
    fullest = _describe_fullest_pool(run)
    run.recorder.log_memory_peaks()
    if not run.world.writes_files:
        return
    emit = run.recorder.events.emit
    if text is not None:
        emit("notice", step=run.step_count, text=f"a sample of what it writes:\n{text}")
    emit(
        "run_finished",
        step=run.step_count,
        how=how,
        steps_here=steps,
        wall_s=wall_s,
        validation_loss=replace_non_finite(values["loss"]) if values else None,
        **({"allocator": fullest} if fullest else {}),
    )


def _try_sample(run: Run, source: Source) -> str | None:
    """Return a sample of the model's text; if it fails, None, with a line for the user.

    The training is over and saved by now: a failed extra must not change its outcome.
    """
    # If parameters are gathered, a forward pass needs all ranks.
    if not (run.world.writes_files or run.program.together):
        return None
    try:
        return generate_sample(run, source)
    except Exception as failure:
        first = (str(failure).splitlines() or [type(failure).__name__])[0]
        run.recorder.notice(f"no sample of what the model writes: {shorten(first)}")
        return None


def _describe_fullest_pool(run: Run) -> str:
    """Return the fullest device's allocator usage as text; "" on a CPU. Every rank calls it."""
    pool = read_device_pool(run.world.device)
    if pool is None:
        return ""
    told = run.world.gather_json([pool.reserved_bytes, describe_pool(pool)])
    return str(max(told)[1])


def _count_until_timeout(run: Run, times: int) -> Iterator[int]:
    """Yield 0, 1, … below `times`, and stop once SAMPLE_S seconds have passed.

    At least one number comes. If all ranks generate together, rank 0's clock decides.
    """
    began_s = time.perf_counter()
    for number in iter_with_progress("sample", times, range(times)):
        yield number
        goes_on = time.perf_counter() - began_s < SAMPLE_S
        if run.program.together:
            goes_on = run.world.broadcast_json(goes_on)
        if not goes_on:
            return


def generate_sample(run: Run, source: Source) -> str | None:
    """Return text that the model continues from `def `; None for models that do not generate text.

    None also under tp, cp and pp: every new length would be traced, or cross all stages. None if
    parameter servers hold rows of tables: they answer only inside of the run's own calls.
    """
    program, tokenizer = run.program, source.tokenizer
    plain = max(program.pipe.size, program.tensor.size, program.context.size) == 1
    plain = plain and not program.plan.layout.serves
    if tokenizer is None or not isinstance(run.model, Llama) or not plain:
        return None
    from shoal.models.generate import generate

    prompt = torch.tensor([tokenizer.encode(PROMPT).ids], device=run.world.device)
    generator = torch.Generator(device=run.world.device).manual_seed(run.plan.seed)
    with run.program.autocast():
        tokens = prompt
        for _ in _count_until_timeout(run, SAMPLE_TOKENS // AT_ONCE):
            tokens = generate(
                run.model,
                tokens,
                steps=AT_ONCE,
                temperature=0.7,
                generator=generator,
                window=run.model.sequence,
            )
    return tokenizer.decode(tokens[0].tolist())
