"""`shoal sample`: generate text with the model of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError
from shoal.cli.words import TRUST
from shoal.wire.phases import phase

if TYPE_CHECKING:  # it imports torch
    from shoal.trainer.jobs.branch_ensemble import BranchLosses

RUN = typer.Argument(..., metavar="RUN", help="A run folder, or one checkpoint in it.")
PROMPT = typer.Option(None, "--prompt", help="The text to go on from.")
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
ENSEMBLE = typer.Option(
    False,
    "--ensemble",
    help="All branches of a branch-train-merge run, weighted by the text so far. Without --prompt: "
    "their losses on each domain, and the weights of a merge.",
)


def sample(
    path: Path = RUN,
    prompt: str | None = PROMPT,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = SEED,
    chat: bool = CHAT,
    average: bool = AVERAGED,
    ensemble: bool = ENSEMBLE,
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

    if ensemble:
        _refuse_of_one_model(chat=chat, average=average)
        sample_branches(path, prompt, tokens, temperature, seed, as_json=as_json, trust=trust)
        return
    if prompt is None:
        raise ConfigError(f"--prompt: is missing; try: shoal sample {path} --prompt 'The'")
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


def _refuse_of_one_model(**said: bool) -> None:
    """Refuse options that choose something of one model's checkpoint."""
    for name, value in said.items():
        if value:
            raise ConfigError(
                f"--{name}: is of one model, and --ensemble of all branches; try: leave one of "
                f"them out"
            )


def sample_branches(
    path: Path,
    prompt: str | None,
    tokens: int,
    temperature: float,
    seed: int,
    *,
    as_json: bool,
    trust: bool,
) -> None:
    """Print what the branches of a run write on together, or how good they are, without a prompt.

    Raises:
        ConfigError: the run has no branches, or another user's run.toml names functions.
    """
    from shoal.config.trust import load_trusted
    from shoal.view.diagnosis.run_folders import find_named_run
    from shoal.view.phase_lines import show_phases

    folder = find_named_run(path)
    if (named := folder / "run.toml").is_file():
        load_trusted(named, [], trust=trust)
    with show_phases(sys.stderr):
        with phase("import"):
            from shoal.trainer.jobs.branch_ensemble import BranchEnsemble
        branches = BranchEnsemble(folder)
        if prompt is None:
            scores = branches.score()
        else:
            text, shares = branches.generate(prompt, tokens, temperature, seed)
    if prompt is not None:
        told = {"prompt": prompt, "text": text, "posterior": shares}
        known = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        typer.echo(json.dumps(told) if as_json else f"{text}\n\ndomain by the text: {known}")
    elif as_json:
        typer.echo(json.dumps(scores.record()))
    else:
        typer.echo("\n".join(format_branch_losses(scores)))


def format_branch_losses(scores: BranchLosses) -> list[str]:
    """Return the table of losses, the best branch, and a command that grows another one."""
    domains, models = list(scores.losses), list(next(iter(scores.losses.values())))
    rows = [["model", *domains, "mean"]]
    for model in models:
        each = [f"{scores.losses[domain][model]:.4f}" for domain in domains]
        rows.append([model, *each, f"{scores.mean(model):.4f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    best = min(scores.weights, key=scores.mean)
    mean = "+".join(
        f"{share:.3f}*{scores.checkpoints[name]}" for name, share in scores.weights.items()
    )
    return [
        "loss on what each domain holds out, nats per token",
        *lines,
        f"best branch: {best}; merge: by the posteriors on held-out data, even: equal shares",
        f"grow a branch from the merge: shoal train checkpoint.initial_load_path='{mean}'",
    ]
