"""`shoal sample`: generate text with the model of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from shoal.cli.words import TRUST
from shoal.wire.phases import phase

RUN = typer.Argument(..., metavar="RUN", help="A run folder, or one checkpoint in it.")
PROMPT = typer.Option(..., "--prompt", help="The text to go on from.")
TOKENS = typer.Option(96, "--tokens", min=1, help="So many tokens more.")
TEMPERATURE = typer.Option(
    0.7, "--temperature", min=0.0, help="Divides the logits; 0 takes the likeliest token."
)
SEED = typer.Option(0, "--seed", help="Of the draws.")
CHAT = typer.Option(
    False, "--chat", help="The prompt is a user's turn; given is the answer (data.source=jsonl:…)."
)
JSON = typer.Option(False, "--json", help="Prompt, text and checkpoint as one JSON document.")
AVERAGED = typer.Option(False, "--average", help="The averaged weights (optimizer.average).")


def sample(
    path: Path = RUN,
    prompt: str = PROMPT,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = SEED,
    chat: bool = CHAT,
    average: bool = AVERAGED,
    as_json: bool = JSON,
    trust: bool = TRUST,
) -> None:
    """Open the newest checkpoint of a run on text, and write on from a prompt.

    A run of `shoal train`, or of a loop of one's own with a model of transformers and
    `parallelize(tokenizer=…)`.

    On one process, whatever the run's layout was. A model.build in its run.toml is called if the
    folder is yours or root's, or with --trust.
    """
    from shoal.checkpoint.format.hub_folder import run_folder
    from shoal.cli.checkpoint import list_run_checkpoints
    from shoal.config.trust import load_trusted
    from shoal.view.phase_lines import show_phases

    checkpoint = list_run_checkpoints(path)[0]
    if (named := run_folder(checkpoint) / "run.toml").is_file():
        load_trusted(named, [], trust=trust)
    with show_phases(sys.stderr):
        with phase("import"):
            from shoal.trainer.jobs.text_generation import generate_text
        text = generate_text(
            run_folder(checkpoint),
            checkpoint,
            prompt,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            chat=chat,
            average=average,
        )
    if as_json:
        told = {"checkpoint": str(checkpoint), "prompt": prompt, "text": text}
        typer.echo(json.dumps(told))
    else:
        typer.echo(text)
