"""Ensemble of the branches of a run: experts of branch-train-merge, each with a domain of its own.

    p(x_t | x_<t) = Σ_j p_j(x_t | x_<t) · p(j | x_<t)         p_j: the model of branch j
    p(j | x_<t)   ∝ π_j · Π_{s<t} p_j(x_s | x_<s)             posterior of its domain; π_j = 1/n

So the text so far decides which experts count. Over a whole sequence the product telescopes: the
ensemble's probability of it is the mean of the branches' probabilities,

    loss = −log( Σ_j π_j · Π_t p_j(x_t | x_<t) ) / T

and never more than log(n)/T above that of the best branch. The weights of a merge by validation are
the mean posteriors of the branches after sequences that were held out.

Source: Li et al. 2022, "Branch-train-merge", sections 3.1 and 4.3 (there the prior π is estimated
from the last 100 sequences; here it is even)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.checkpoint.format.hub_folder import HUB, TOKENIZER, run_folder
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.checkpoint.format.weighted_paths import BRANCH
from shoal.config.owners import list_data_sections, list_owner_names
from shoal.config.sections import Config
from shoal.data.digits import EvenSubset
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.sources import open_source
from shoal.fabric.device import accelerator_type
from shoal.models.loss import find_logits
from shoal.trainer.jobs.text_generation import (
    context_length,
    load_weights,
    make_saved_model,
    read_text_config,
    read_tokenizer,
)
from shoal.trainer.state.initial_weights import average_tensors
from shoal.wire.phases import iter_with_progress

MOST_SAMPLES = 256
"""Held-out samples of a domain that a table of losses reads, spread evenly over them."""
AT_A_TIME = 8
"""Sequences in one forward pass."""


@dataclass(frozen=True)
class BranchLosses:
    """Losses of a run's branches on every domain, in nats per token.

    Attributes:
        losses: by domain, then by model: each branch, `merge` (the mean by `weights`), `even` (the
            mean by equal shares) and `ensemble`.
        posteriors: by domain: mean posterior of each branch after a held-out sequence.
        weights: shares of a merge by validation: the mean of the posteriors over the domains.
        checkpoints: by branch, its checkpoint.
    """

    losses: dict[str, dict[str, float]]
    posteriors: dict[str, dict[str, float]]
    weights: dict[str, float]
    checkpoints: dict[str, str]

    def mean(self, model: str) -> float:
        """Return the mean loss of a model over the domains."""
        return sum(row[model] for row in self.losses.values()) / len(self.losses)

    def record(self) -> dict[str, Any]:
        """Return all as one JSON document, with the means over the domains."""
        models = next(iter(self.losses.values()))
        return {**asdict(self), "mean": {model: self.mean(model) for model in models}}


def list_branches(folder: Path) -> dict[str, Path]:
    """Return the newest checkpoint of every branch of a run, by the name of its domain.

    Raises:
        ConfigError: the run saved no branch.
    """
    found = {}
    for root in (folder, *sorted(folder.glob("island-*"))):
        for tag in sorted(root.glob(f"tags/{BRANCH}*")):
            if saved := list_checkpoints(tag / "checkpoints"):
                found[tag.name.removeprefix(BRANCH)] = saved[0].path
    if not found:
        raise ConfigError(
            f"{folder}: has no branches for an ensemble; try: a run with islands.data=own "
            "islands.method=branch-train-merge"
        )
    return found


class BranchEnsemble:
    """The models of all branches of a run, on one process and device.

    Args:
        folder: of the run.

    Raises:
        ConfigError: the run saved no branch, or is not on text.
    """

    def __init__(self, folder: Path) -> None:
        self.checkpoints = list_branches(folder)
        self.names = list(self.checkpoints)
        self.folder = run_folder(self.checkpoints[self.names[0]])
        self.config = read_text_config(self.folder)
        self.tokenizer = read_tokenizer(self.folder, is_own=self.config is None)
        self.device = torch.device(accelerator_type() or "cpu")
        self.models = [self._build(path) for path in self.checkpoints.values()]
        self.window = context_length(self.models[0], self.config)

    def _build(self, checkpoint: Path) -> nn.Module:
        model = make_saved_model(self.config, self.folder, self.tokenizer.get_vocab_size())
        load_weights(model, checkpoint, False)
        return model.to(self.device).eval()

    @torch.no_grad()
    def generate(
        self, prompt: str, tokens: int, temperature: float = 1.0, seed: int = 0
    ) -> tuple[str, dict[str, float]]:
        """Return a prompt with the text after it, and the posterior of each branch at its end.

        Args:
            tokens: new tokens.
            temperature: divides the logarithms of the mixture; 0 takes the likeliest token.
            seed: of the draws.

        Raises:
            ConfigError: a prompt without tokens.
        """
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if not ids:
            raise ConfigError("--prompt: is empty, and there is nothing to go on from; try: 'The'")
        written = torch.tensor([ids], device=self.device)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        evidence = self._evidence(written)
        for _ in iter_with_progress("sample", tokens, range(tokens)):
            view = written[:, -self.window :]
            each = torch.stack([log_odds(model, view)[0, -1] for model in self.models])
            mixed = torch.logsumexp(each + torch.log_softmax(evidence, 0)[:, None], 0)
            if temperature == 0:
                following = mixed.argmax(-1, keepdim=True)
            else:
                odds = torch.softmax(mixed / temperature, -1)
                following = torch.multinomial(odds, 1, generator=generator)
            evidence = evidence + each[:, following[0]]
            written = torch.cat((written, following[None]), 1)
        shares = torch.softmax(evidence, 0).tolist()
        text: str = self.tokenizer.decode(written[0].tolist())
        return text, dict(zip(self.names, shares, strict=True))

    def _evidence(self, ids: Tensor) -> Tensor:
        """Return log Π p_j(x_s | x_<s) of a prompt [1, seq] for every branch [n]."""
        view = ids[:, -self.window :]
        return torch.stack(
            [sequence_log_odds(model, view[:, :-1], view[:, 1:])[0] for model in self.models]
        )

    def score(self) -> BranchLosses:
        """Return the losses of branches, merges and ensemble on what each domain holds out.

        Raises:
            ConfigError: a user's own loop, or a domain that holds out nothing.
        """
        if self.config is None:
            raise ConfigError(f"{self.folder}: has no run.toml; try: a run of `shoal train`")
        domains = self._open_domains(self.config)
        posteriors, losses = {}, {}
        for domain, batches in domains.items():
            each, tokens = self._log_odds(self.models, batches)
            shares = torch.softmax(each, 0).mean(1).tolist()
            posteriors[domain] = dict(zip(self.names, shares, strict=True))
            whole = [*each.sum(1).tolist(), mix(each).sum().item()]
            names = [*self.names, "ensemble"]
            losses[domain] = {n: -one / tokens for n, one in zip(names, whole, strict=True)}
        weights = {
            name: sum(row[name] for row in posteriors.values()) / len(posteriors)
            for name in self.names
        }
        even = dict.fromkeys(self.names, 1 / len(self.names))
        for name, shares_by_name in (("merge", weights), ("even", even)):
            model = self._merge(shares_by_name)
            for domain, batches in domains.items():
                each, tokens = self._log_odds([model], batches)
                losses[domain][name] = -each.sum().item() / tokens
        paths = {name: str(path) for name, path in self.checkpoints.items()}
        return BranchLosses(losses, posteriors, weights, paths)

    def _open_domains(self, config: Config) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return batches of (inputs, targets) [batch, seq] that each domain holds out."""
        named = replace(
            config, islands=replace(config.islands, at=""), data=replace(
                config.data, tokenizer=str(self.folder / HUB / TOKENIZER)
            ),
        )  # fmt: skip
        names, found = list_owner_names(named), {}
        for name, section in zip(names, list_data_sections(named), strict=True):
            data = open_source(section, config.train.seed).validation
            if not is_indexed(data) or not len(data):
                raise ConfigError(
                    f"owner {name}: holds out nothing to compare branches on; try: "
                    "data.validation=0.1"
                )
            if len(data) > MOST_SAMPLES:
                data = EvenSubset(data, MOST_SAMPLES, True)
            rows = [data[k] for k in range(len(data))]
            found[name] = [
                (
                    torch.stack([torch.as_tensor(one[0]) for one in part]).to(self.device),
                    torch.stack([torch.as_tensor(one[1]) for one in part]).to(self.device),
                )
                for part in (rows[k : k + AT_A_TIME] for k in range(0, len(rows), AT_A_TIME))
            ]
        return found

    @torch.no_grad()
    def _log_odds(
        self, models: Sequence[nn.Module], batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, int]:
        """Return log Π p_j of every model and sequence [n, sequences], and the number of tokens."""
        rows = [
            torch.stack([sequence_log_odds(model, inputs, targets) for model in models])
            for inputs, targets in batches
        ]
        return torch.cat(rows, 1), sum(targets.numel() for _, targets in batches)

    @torch.no_grad()
    def _merge(self, weights: Mapping[str, float]) -> nn.Module:
        """Return a model with the weighted mean of all branches' weights."""
        model = make_saved_model(self.config, self.folder, self.tokenizer.get_vocab_size())
        load_weights(model, next(iter(self.checkpoints.values())), False)
        model = model.to(self.device).eval()
        states = [one.state_dict() for one in self.models]
        shares = [weights[name] for name in self.names]
        for name, tensor in model.state_dict().items():
            tensor.copy_(average_tensors(shares, [state[name] for state in states]))
        return model


def log_odds(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return log p(· | x_≤t) of every position: [batch, seq, vocabulary], float32."""
    return torch.log_softmax(find_logits(model(inputs)).float(), -1)


def sequence_log_odds(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return log Π_t p(target_t | inputs_≤t) of each sequence: [batch], float64.

    Args:
        inputs, targets: token ids [batch, seq].
    """
    each = log_odds(model, inputs).gather(-1, targets[..., None].long())
    return each.squeeze(-1).double().sum(-1)


def mix(evidence: Tensor) -> Tensor:
    """Return log Σ_j π_j · exp(evidence_j) [sequences] with even π, of evidence [n, sequences].

    >>> mix(torch.zeros(4, 2))
    tensor([0., 0.])
    """
    return torch.logsumexp(evidence, 0) - math.log(len(evidence))
