"""Options of islands: groups of processes that train alone and merge periodically.

The fields are the keys of `[islands]` in run.toml. `settled` replaces unset numbers by the method's
defaults:

    method                period  outer         lr   momentum  codec    fragments  overlap
    local-sgd             50      sgd           1    0         none     1          0
    diloco                50      sgd nesterov  0.7  0.9       none     1          0
    streaming-diloco      50      sgd nesterov  0.7  0.9       e3m0     4          1
    fedavg, fedprox       50      sgd           1    0         none     1          0
    fedopt                50      server        0.1  (0.9)     none     1          0
    branch-train-merge    500     sgd           1    0         none     1          0
    sparse-loco           50      sgd           1    0         top2bit  1          0
    noloco                50      its own       0.7  0.5       none     1          0
    scaffold              50      sgd           1    0         none     1          0

With `data = own` every island holds data of its own: an owner. All owners take all their steps, no
owner is refused for its direction, and `concurrent` groups of processes may train the owners in
turn.

Source: Douillard et al. 2023, 2025 (DiLoCo, streaming); McMahan et al. 2017; Li et al. 2020
(FedProx); Reddi et al. 2021 (FedOpt); Li et al. 2022 (branch-train-merge); Sarfi et al. 2025
(SparseLoCo); Kolehmainen et al. 2025 (NoLoCo); Karimireddy et al. 2020 (SCAFFOLD); Yin et al. 2018
(median and trimmed mean)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.base.errors import ConfigError, format_choice_error

METHODS = (
    "local-sgd", "diloco", "streaming-diloco", "fedavg", "fedprox", "fedopt",
    "branch-train-merge", "sparse-loco", "noloco", "scaffold",
)  # fmt: skip
CODECS = ("none", "bf16", "int8", "e3m0", "top2bit", "sign")
WEIGHTINGS = ("tokens", "samples", "uniform")
DATA = ("shared", "own")
MERGES = ("mean", "median", "trimmed")
PACES = ("speed", "equal")
SERVERS = ("adam", "yogi", "adagrad")
WORDS = {
    "method": METHODS, "codec": CODECS, "weighting": WEIGHTINGS, "pace": PACES, "server": SERVERS,
    "data": DATA, "merge": MERGES,
}  # fmt: skip
"""Words of each key that has a few; `outer` has those of torch.optim, and is checked with a method.
"""

KEEP = 2
"""Fewest checkpoints of an island that guarantee a common round."""

OPEN = -1.0
"""Unset value of a number that the method decides; for counts it is 0, for texts ""."""
LEAST_COSINE, ANY_DIRECTION = -0.2, -1.0
"""`cosine` of islands that share a stream of samples, and of owners, whose data may be unlike."""


@dataclass(frozen=True)
class IslandsPolicy:
    """Options of [islands]: groups of processes that train alone and merge periodically.

    Attributes:
        method, count: merge method ("none": no islands), and number of islands.
        period: inner steps between merges.
        outer, outer_lr, outer_momentum: outer optimizer of the merged weights: a class of
            torch.optim.
        codec: codec of the messages: none, bf16, int8, e3m0, top2bit, sign.
        fragments, overlap: parts of the model that travel one by one; inner steps meanwhile.
        mixing: share of its distance to the merged weights that an island keeps: 0 … below 1.
        weighting, pace: tokens, samples or uniform: weight of an island in a merge · speed: slower
            islands run fewer steps.
        data: shared: one stream of samples for all islands · own: each island is an owner.
        epochs: passes of an owner over its data between merges, instead of `period` steps.
        concurrent: groups of processes that train the owners in turn; 0: one for each owner.
        sample: share of the owners that trains in a round.
        merge, trim: mean, median or trimmed: how changes become one · share that trimmed drops at
            each end.
        proximal, server: fedprox's μ · fedopt's rule: adam, yogi, adagrad.
        regions, far_period: groups that merge among themselves; rounds from one merge of all to the
            next.
        at, index, connections: HOST:PORT of the rendezvous of several machines; index of this
            island; TCP connections to each other island.
        bound, cosine, refusals: limits of the admission test; refusals in a row that stop an
            island.
        least, wait_s: islands may come and go while so many are left (0: the list is fixed);
            longest wait for islands without which nobody may go on.
        key, keys: with least: file of this island's own key · files of the public keys that may
            join; connections are encrypted then.

    The constructor checks nothing. `settled()` returns a copy in which unset values (0, −1, "") are
    the method's defaults; it raises a ConfigError with the nearest legal value.
    """

    method: str = "none"
    """none, local-sgd, diloco, streaming-diloco, fedavg, fedprox, fedopt, branch-train-merge, …"""
    count: int = 1
    """islands; on one machine each gets launch.processes processes"""
    period: int = 0
    """inner steps between merges; 0: the method's own"""
    outer: str = "sgd"
    """optimizer of the merged weights: a class of torch.optim by its name"""
    outer_lr: float = OPEN
    """its learning rate; −1: the method's own"""
    outer_momentum: float = OPEN
    """its momentum (sgd: Nesterov's); −1: the method's own"""
    codec: str = ""
    """how weights travel: none, bf16, int8, e3m0 (4 bits), top2bit, sign; "": the method's own"""
    fragments: int = 0
    """streaming: parts of the model that travel one by one; 0: the method's own"""
    overlap: int = -1
    """inner steps that go on while a part travels; −1: the method's own"""
    mixing: float = 0.0
    """share of its distance to the merged weights that an island keeps at a merge"""
    weighting: str = "tokens"
    """tokens, samples, uniform: what an island's word weighs in a merge; samples: with data=own
    those that an owner holds; scaffold is uniform"""
    pace: str = "speed"
    """speed: slower islands take fewer steps in a round · equal: all take islands.period"""
    proximal: float = 0.01
    """fedprox: μ, the pull towards the merged weights"""
    server: str = "adam"
    """fedopt: adam, yogi, adagrad"""
    data: str = "shared"
    """shared: all islands take turns in one stream of samples · own: each owner trains on its own
    data, which stay where they are; data.source may hold {owner}"""
    epochs: int = 0
    """data=own: passes of an owner over its data between merges, instead of period; as
    islands.period="1 epoch"; 0: period"""
    concurrent: int = 0
    """data=own, one machine: owners that train at a time, the others wait; 0: all"""
    sample: float = 1.0
    """data=own: share of the owners that trains in a round, drawn by seed and round"""
    merge: str = "mean"
    """mean, median, trimmed: how changes become one; median and trimmed bear a few wrong owners"""
    trim: float = 0.2
    """trimmed: share of the changes that is dropped at each end, number by number, rounded down to
    whole changes: of 4 at least 0.25"""
    regions: int = 1
    """two tiers: so many groups of neighbouring islands merge among themselves in between"""
    far_period: int = 1
    """two tiers: every so many rounds all islands merge, else those of one region"""
    at: str = ""
    """HOST:PORT where island 0 waits for the others; with islands.least one of each island, with
    commas between; "": all islands on this machine"""
    index: int = 0
    """with islands.at: which island this is, from 0"""
    connections: int = 2
    """connections between two islands per process, for links where one does not fill the line"""
    bound: float = 8.0
    """admission: how many deviations (MAD) from the median of past norms a change may be"""
    cosine: float = LEAST_COSINE
    """admission, 3 islands or more: least cosine of a change to the mean of the others; with
    data=own −1 in the place of −0.2: none is refused for its direction"""
    refusals: int = 3
    """refusals in a row after which an island stops"""
    least: int = 0
    """islands that are enough to go on: islands may come and go; 0: the list of islands is fixed"""
    wait_s: float = 600.0
    """with islands.least: longest wait for islands without which nobody may go on"""
    key: str = ""
    """with islands.least: file of this island's own key, of `shoal islands key`; {index} in it is
    the island's number"""
    keys: str = ""
    """with islands.key: files of the public keys that may join, with commas between; read again
    while the run lasts; connections are encrypted"""

    @property
    def on(self) -> bool:
        """True if the run has islands; one island with an outer optimizer counts."""
        return self.method != "none"

    @property
    def nesterov(self) -> bool:
        """True if the outer momentum is Nesterov's: sgd with momentum."""
        return self.outer == "sgd" and self.outer_momentum > 0

    @property
    def owned(self) -> bool:
        """True if each island holds data of its own."""
        return self.on and self.data == "own"

    @property
    def changes_members(self) -> bool:
        """True if islands may come and go while the run lasts."""
        return self.on and self.least > 0

    @property
    def groups(self) -> int:
        """Number of groups of processes; each trains one island, or several owners in turn."""
        return min(self.concurrent, self.count) if self.concurrent else self.count

    def owners_of(self, group: int) -> tuple[int, ...]:
        """Return the data owners that a group of processes trains, one after another.

        >>> IslandsPolicy("fedavg", count=5, data="own", concurrent=2).owners_of(1)
        (1, 3)
        """
        return tuple(range(group, self.count, self.groups))

    def resolved(self) -> IslandsPolicy:
        """Return a checked copy with every unset number set to the method's default.

        Raises a ConfigError with the nearest legal value.

        >>> one = IslandsPolicy("diloco", count=4).resolved()
        >>> one.period, one.outer_lr, one.outer_momentum, one.codec, one.fragments
        (50, 0.7, 0.9, 'none', 1)
        """
        self._check_words()
        if not self.on:
            return self._without()
        own = DEFAULTS[self.method]
        period = self.period or own.period
        # A short period reduces the method's defaults; the user's own values are checked.
        fragments = self.fragments or max(1, min(own.fragments, period // (own.overlap + 1)))
        slot = max(1, period // fragments)
        found = replace(
            self,
            period=period,
            fragments=fragments,
            overlap=min(own.overlap, slot - 1) if self.overlap < 0 else self.overlap,
            outer_lr=own.outer_lr if self.outer_lr == OPEN else self.outer_lr,
            outer_momentum=(
                own.outer_momentum if self.outer_momentum == OPEN else self.outer_momentum
            ),
            codec=self.codec or own.codec,
            **self._values_of_owners(),
        )
        found._check()
        return found

    def _values_of_owners(self) -> dict[str, Any]:
        """Return the defaults that differ if each island holds data of its own."""
        if self.data != "own":
            return {}
        weighs_all_alike = self.method == "scaffold" and self.weighting == "tokens"
        return {
            "pace": "equal",
            "cosine": ANY_DIRECTION if self.cosine == LEAST_COSINE else self.cosine,
            "weighting": "uniform" if weighs_all_alike else self.weighting,
        }

    def _without(self) -> IslandsPolicy:
        if self.count > 1 or self.at or self.data == "own":
            said = f"count = {self.count}" if self.count > 1 else f"at = {self.at}"
            said = said if self.data == "shared" else f"data = {self.data}"
            near = "diloco" if self.data == "shared" else "fedavg"
            raise ConfigError(
                f"islands.{said}: how islands merge is not said; try: islands.method={near}"
            )
        return self

    def _check_words(self) -> None:
        """Refuse an unknown value of a key, also without a method: no typo selects a default."""
        for key, known in WORDS.items():
            got = getattr(self, key)
            unset = getattr(type(self), key)
            if got != unset and got not in known:
                raise ConfigError(format_choice_error(f"islands.{key}", got, known))

    def _check(self) -> None:
        for key, least in LEAST.items():
            if getattr(self, key) < least:
                raise ConfigError(
                    f"islands.{key} = {getattr(self, key):g}: at least {least:g}; try: "
                    f"islands.{key}={least:g}"
                )
        for key, most in (("sample", 1.0), ("trim", 0.49)):
            if not 0 < getattr(self, key) <= most:
                raise ConfigError(
                    f"islands.{key} = {getattr(self, key):g}: a share, above 0 and at most "
                    f"{most:g}; try: islands.{key}={getattr(IslandsPolicy(), key):g}"
                )
        if not 0 <= self.mixing < 1:
            raise ConfigError(
                f"islands.mixing = {self.mixing:g}: 0 (take the merged weights) to below 1 (keep "
                f"the own ones); try: islands.mixing={0 if self.mixing < 0 else 0.5}"
            )
        self._check_fragments()
        self._check_places()
        self._check_owners()
        if self.changes_members or self.key:
            from shoal.base.layouts.changing_members import check_changing_members

            check_changing_members(self, is_address)
        if self.merge == "trimmed":
            from shoal.base.layouts.trimmed_mean import check_trimmed_policy

            check_trimmed_policy(self)

    def _check_fragments(self) -> None:
        if self.fragments > 1 and self.method != "streaming-diloco":
            raise ConfigError(
                f"islands.fragments = {self.fragments}: {self.method} sends the whole model at "
                f"once; try: islands.method=streaming-diloco"
            )
        if self.fragments > self.period:
            raise ConfigError(
                f"islands.fragments = {self.fragments}: more than islands.period = {self.period} "
                f"inner steps; try: islands.fragments={self.period}"
            )
        slot = self.period // self.fragments
        if self.overlap >= slot:
            raise ConfigError(
                f"islands.overlap = {self.overlap}: one part travels at a time and they leave "
                f"every {slot} steps; try: islands.overlap={slot - 1}"
            )

    def _check_owners(self) -> None:
        """Refuse keys that need data owners if there are none, and methods they cannot use."""
        if self.data == "shared":
            plain = IslandsPolicy()
            for key in ("epochs", "concurrent", "sample"):
                if getattr(self, key) != getattr(plain, key):
                    raise ConfigError(
                        f"islands.{key} = {getattr(self, key):g}: is of owners, who hold data of "
                        f"their own; try: islands.data=own"
                    )
            if self.method == "scaffold":
                raise ConfigError(
                    "islands.method = scaffold: corrects the drift of owners, who hold data of "
                    "their own; try: islands.data=own, or islands.method=fedavg"
                )
            return
        for key, only in (("fragments", 1), ("overlap", 0), ("regions", 1), ("mixing", 0)):
            if getattr(self, key) != only:
                raise ConfigError(
                    f"islands.{key} = {getattr(self, key):g}: owners merge the whole model, all at "
                    f"once; try: islands.{key}={only}"
                )
        if self.method == "noloco":
            raise ConfigError(
                "islands.method = noloco: merges random pairs, owners merge all at once; try: "
                "islands.method=fedavg"
            )
        if self.method == "scaffold" and self.weighting != "uniform":
            raise ConfigError(
                f"islands.weighting = {self.weighting}: scaffold's controls are means in which all "
                f"owners weigh the same; try: islands.weighting=uniform"
            )

    def _check_places(self) -> None:
        if not 0 <= self.index < self.groups:
            close = max(0, min(self.index, self.groups - 1))
            raise ConfigError(
                f"islands.index = {self.index}: islands are counted from 0 to islands.count − 1 = "
                f"{self.groups - 1}; try: islands.index={close}"
            )
        if self.at and not self.changes_members and not is_address(self.at):
            raise ConfigError(
                f"islands.at = {self.at}: HOST:PORT is wanted; try: islands.at=10.0.0.1:29400"
            )
        if self.count % self.regions:
            fits = max(n for n in range(1, self.regions) if self.count % n == 0)
            raise ConfigError(
                f"islands.regions = {self.regions}: does not divide islands.count = {self.count}; "
                f"try: islands.regions={fits}"
            )


LEAST = {
    "count": 1, "period": 1, "outer_lr": 0, "outer_momentum": 0, "fragments": 1, "proximal": 0,
    "regions": 1, "far_period": 1, "connections": 1, "bound": 1, "cosine": -1, "refusals": 1,
    "epochs": 0, "concurrent": 0, "least": 0, "wait_s": 1,
}  # fmt: skip
"""Smallest value of each key."""


def check_keep(keep: int) -> None:
    """Refuse fewer than two kept checkpoints (`checkpoint.keep`) for a run of islands.

    Raises:
        ConfigError: keep is below 2.
    """
    if keep < KEEP:
        raise ConfigError(
            f"checkpoint.keep = {keep}: an island keeps its state before and after a commit, which "
            f"may have happened for others only; try: checkpoint.keep={KEEP}"
        )


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT.

    >>> [is_address(text) for text in ("10.0.0.1:29400", "[::1]:29400", "here", ":1")]
    [True, True, False, False]
    """
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536


def _own(
    period: int, lr: float, momentum: float, codec: str = "none", *, streams: bool = False
) -> IslandsPolicy:
    fragments, overlap = (4, 1) if streams else (1, 0)
    return IslandsPolicy(
        period=period,
        outer_lr=lr,
        outer_momentum=momentum,
        codec=codec,
        fragments=fragments,
        overlap=overlap,
    )


DEFAULTS = {
    "local-sgd": _own(50, 1.0, 0.0),
    "diloco": _own(50, 0.7, 0.9),
    "streaming-diloco": _own(50, 0.7, 0.9, "e3m0", streams=True),
    "fedavg": _own(50, 1.0, 0.0),
    "fedprox": _own(50, 1.0, 0.0),
    "fedopt": _own(50, 0.1, 0.9),
    "branch-train-merge": _own(500, 1.0, 0.0),
    "sparse-loco": _own(50, 1.0, 0.0, "top2bit"),
    "noloco": _own(50, 0.7, 0.5),
    "scaffold": _own(50, 1.0, 0.0),
}
"""Default options of each method; see the module."""
