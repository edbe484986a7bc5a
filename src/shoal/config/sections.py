"""Sections of run.toml, one dataclass each: every key, its type and its default.

These names are the public interface of `shoal train`: `section.key=value` on the command line and
`[section]` tables in a file. Every key here has a reader.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.layouts.layout import AXES, STAGES
from shoal.base.layouts.policies import (
    BlocksPolicy,
    CallPolicy,
    CheckpointPolicy,
    CompilePolicy,
    CompressPolicy,
    DeferSyncPolicy,
    FsdpPolicy,
    LoopPolicy,
    MemoryPolicy,
    OptimizerPolicy,
    PrecisionPolicy,
    ReadPolicy,
    SyncBatchNormPolicy,
    TensorPolicy,
)
from shoal.base.layouts.policy_fields import choice_field, number_field

TOKEN_DTYPES = ("auto", "uint8", "uint16", "uint32", "int32", "int64")
"""Of raw files of tokens, all little-endian; auto: as a meta.json beside them says."""

OTHER_DTYPES = {
    **{"u8": "uint8", "u16": "uint16", "u32": "uint32", "i32": "int32", "i64": "int64"},
    **{"int16": "uint16", "int": "int32", "uint64": "int64", "long": "int64"},
}
"""Alternative names of these formats."""


@dataclass(frozen=True)
class ModelSection(CallPolicy):
    """[model]: name or builder of the model, and the model's own arguments.

    Attributes:
        name: a model of Shoal's, a published size such as llama-3-8b, or hf:PATH.
        build: pkg.mod:function giving an nn.Module, instead of a name; "" none.
        loss: pkg.mod:function(outputs, targets) giving (sum, count) or unreduced values; "" the
            model's default.
        arguments: every other key of [model], for the model's builder.
    """

    name: str = "llama"
    """llama, gpt, moe, mlp, resnet, vit, a published size such as llama-3-8b, or hf:PATH"""
    build: str = ""
    """pkg.mod:function giving an nn.Module, instead of a name"""
    loss: str = ""
    """pkg.mod:function(outputs, targets) giving (sum, count) or unreduced values"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """every other key of [model]: passed to the model's builder"""


@dataclass(frozen=True)
class TuneSection:
    """[tune]: adapters of peft over a model whose own weights are frozen.

    Attributes:
        adapter: none, lora or dora.
        rank, alpha, dropout: of each adapter.
        targets: ends of the names of the layers that get one; () all linear layers but the output
            head.

    `scale` is alpha, or 2 × rank without one
    """

    adapter: str = choice_field(("none", "lora", "dora"), {"qlora": "lora", "full": "none"})
    """none, lora, dora: trains adapters of peft, and freezes the model's own weights"""
    rank: int = number_field(8, least=1)
    """numbers between an adapter's two matrices"""
    alpha: float = number_field(0.0, least=0, usual=16)
    """an adapter's sum is scaled by alpha / rank; 0: 2 × rank"""
    dropout: float = number_field(0.0, least=0, below=1)
    """of an adapter's inputs"""
    targets: tuple[str, ...] = ()
    """layers that get one, by the end of their names (q_proj,v_proj); none: all linear ones but the
    output head"""

    @property
    def scale(self) -> float:
        """Return lora_alpha of peft: alpha, or 2 × rank."""
        return self.alpha or 2.0 * self.rank


@dataclass(frozen=True)
class DataSection(ReadPolicy):
    """[data]: training and validation data of a run.

    Attributes:
        source: stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, hf:FOLDER, tokens:FOLDER,
            images:FOLDER, wds:GLOB, digits, synthetic, mix:0.7*SOURCE+0.3*SOURCE, or
            pkg.mod:function.
        field: of jsonl, parquet and hf: the key that holds the text.
        dtype: of the .bin files of tokens:FOLDER.
        validation: share held out, 0 … below 1, or a second source, both as text.
        tokenizer: bpe:VOCABULARY, trained on the text, or the path of a tokenizer.json.
        packing: several examples to a row, each a document of its own.
        sequence: tokens per sample.
        image_size: pixels on each side.
        workers: loader processes per rank; 0 loads between steps.
        collate: pkg.mod:function that joins a list of samples into a batch; "" torch's default.
        owners: names of the owners (islands.data=own), which {owner} in source stands for.
        split: how one dataset is dealt to owners, for experiments.

    `load` checks numbers, `check_data` the rest.
    """

    source: str = "stdlib"
    """stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, hf:FOLDER, tokens:FOLDER, images:FOLDER,
    wds:GLOB, digits, synthetic, mix:0.7*SOURCE+0.3*SOURCE, or pkg.mod:function"""
    field: str = ""
    """of jsonl, parquet, hf: the key that holds a row's text; empty: messages, prompt + completion,
    or text"""
    dtype: str = choice_field(TOKEN_DTYPES, OTHER_DTYPES)
    """of the .bin files of tokens: uint8, uint16, uint32, int32, int64; auto: as meta.json beside
    them says, else uint16"""
    validation: str = "0.02"
    """share of files or samples held out, or a second source for validation"""
    tokenizer: str = "bpe:2048"
    """bpe:VOCABULARY trained on the text and cached, or the path of a tokenizer.json"""
    sequence: int = number_field(128, least=1)
    """tokens per sample"""
    packing: str = choice_field(("off", "on"))
    """of examples (jsonl, parquet, hf): on packs several to a row, which do not attend to each
    other"""
    image_size: int = number_field(64, least=1)
    """of images and wds: pixels on each side, to which images are scaled and cut"""
    workers: int = number_field(0, least=0)
    """loader processes per rank; 0 loads between steps"""
    collate: str = ""
    """pkg.mod:function that joins a list of samples into a batch"""
    owners: tuple[str, ...] = ()
    """names that {owner} in source and validation stands for (islands.data=own); none: those of the
    files on one machine, 0, 1, … on several"""
    split: str = ""
    """even, labels:1, dirichlet:0.1: deals one dataset to the owners (islands.data=own), for
    experiments: equal parts, so many labels each, or shares of each label drawn by Dirichlet's α"""


@dataclass(frozen=True)
class TrainSection(CompilePolicy, SyncBatchNormPolicy, DeferSyncPolicy, LoopPolicy):
    """[train]: length of the run, batch and micro-batch, and checks during training."""

    steps: int = number_field(0, least=0, usual=150)
    """optimizer steps; 0 means train.epochs decides"""
    epochs: int = number_field(0, least=0)
    """passes over the data; 0 means train.steps decides"""
    batch: int = number_field(0, least=0, usual=16)
    """samples per optimizer step over all ranks; 0: from micro_batch and accumulate"""
    micro_batch: int = number_field(0, least=0, usual=2)
    """samples per forward pass on one rank; 0: its whole share where that fits, chosen once"""
    accumulate: int = number_field(0, least=0)
    """micro-batches per rank and step; fixes micro_batch once, is re-derived ever after"""
    validate_every: int = number_field(0, least=0)
    """steps between validations; 0: at the end only"""
    validate_samples: str = "auto"
    """samples of one validation, spread evenly over those held out, or all; auto: all validations
    together read 15 % of what the run trains on, each at least 64"""
    on_oom: str = choice_field(
        ("stop", "halve"), {"true": "halve", "false": "stop", "retry": "halve"}
    )
    """stop, halve: what happens where a rank runs out of memory; halve starts again from the last
    checkpoint with half micro-batches, the batch stays; dropout and BatchNorm are other draws"""
    deterministic: bool = False
    """ask CUDA for deterministic kernels"""
    prove: str = choice_field(("quick", "off"))
    """quick, off: before a fresh run on several processes, prove the layout on two small steps"""
    on: tuple[str, ...] = ()
    """pkg.mod:function hooks: called with every event and every step's row, a dict; what one gives,
    "stop" or "save", is done after the next step. A class (shoal.sinks:TensorBoard) is made for the
    run folder"""


@dataclass(frozen=True)
class LayoutSection(BlocksPolicy, CompressPolicy, TensorPolicy):
    """[layout]: strategy and degrees of parallelism as the user wrote them, unchecked.

    Attributes:
        strategy: a name, or auto; it decides degrees of 0, zero = −1, schedule = "" and chunks = 0.
        dp_replicate, dp_shard, pp, cp, tp, ep: degrees of the axes (`Layout`).
        zero: what dp_shard splits: 1 optimizer state, 2 gradients too, 3 parameters too.
        threads: replicas within one process, for strategy dp.
        servers, updates, staleness, serves: of strategy parameter-server
            (base/layouts/parameter_servers.py).

    `degrees()` returns the degrees that are set; `named()` the strategy as far as it is known
    """

    strategy: str = "auto"
    """auto, single, dp, ddp, zero1–3 (3 = fsdp), hsdp, tp, pp, cp, ep, 3d, schedules; or degrees"""
    dp_replicate: int = 0
    """replicas of the whole model"""
    dp_shard: int = 0
    """ranks that share one copy of the states"""
    zero: int = -1
    """what dp_shard splits: 1 optimizer state, 2 + gradients, 3 + parameters; −1: by strategy"""
    threads: int = 0
    """replicas within one process, for strategy dp; 0: one per GPU, on a CPU two"""
    pp: int = 0
    """ranks to which the layers are dealt: a pipeline"""
    cp: int = 0
    """ranks that share a sequence, each with a part of its tokens and all weights"""
    tp: int = 0
    """ranks that share every layer, each with a part of its weights"""
    ep: int = 0
    """data-parallel ranks to which the experts of a mixture are dealt; tokens travel to them"""
    schedule: str = ""
    """of pp: gpipe (= afab), 1f1b (default), interleaved, zero-bubble, zbv, dualpipe"""
    chunks: int = number_field(0, least=0)
    """stages per rank under interleaved; 0: two"""
    servers: int = number_field(0, least=0)
    """of parameter-server: how many of the last ranks hold and step the weights; 0: one"""
    updates: str = ""
    """of parameter-server: synchronous (default), bounded-stale, asynchronous"""
    staleness: int = number_field(0, least=0)
    """of bounded-stale: steps that weights may lack when their gradient is applied; 0: twice the
    workers"""
    serves: str = ""
    """of parameter-server: what servers hold: weights (default: all), embeddings (rows of tables
    travel as they are used, the rest is ddp between workers), or some tables: items,users.*"""

    def named(self) -> str:
        """Return the strategy, as far as name and degrees determine it without a process count."""
        if self.strategy in STAGES or self.dp_shard < 2:
            return self.strategy
        stage = "hsdp" if self.dp_replicate > 1 else "fsdp"
        return {1: "zero1", 2: "zero2"}.get(self.zero, stage)

    def degrees(self) -> dict[str, int]:
        """Return the degrees that the user set, by axis."""
        given = {axis: getattr(self, axis) for axis in (*AXES[1:], "ep")}
        # With a named strategy, a degree of 1 adds nothing.
        least = 1 if self.strategy == "auto" else 2
        return {axis: degree for axis, degree in given.items() if degree >= least or degree < 0}


@dataclass(frozen=True)
class RunSection:
    """[run]: place of the run's files."""

    folder: str = "runs"
    """where run folders are made"""
    name: str = ""
    """empty: model, data and a number"""


@dataclass(frozen=True)
class LaunchSection:
    """[launch]: number of processes and of restarts."""

    processes: int = number_field(0, least=0, usual=2)
    """processes on this machine; 0: one per GPU, else 2 where there are 2 cores"""
    nodes: int = number_field(1, least=1)
    """machines; more than one are started by torchrun or srun"""
    restarts: int = number_field(3, least=0)
    """restarts from the last checkpoint before the run gives up"""
    patience_s: float = number_field(60.0, least=0)
    """seconds that a rank which the others wait for, told as late, may still come back in"""
    grace_s: float = number_field(0.0, least=0)
    """seconds that a stop (SIGTERM, SIGUSR1, Ctrl-C) may take to save, a little less than the
    scheduler waits; 0: a minute, two steps and three saves, as they are measured"""


@dataclass(frozen=True)
class Config:
    """A whole run.toml: one field per section, with its defaults."""

    model: ModelSection = ModelSection()
    tune: TuneSection = TuneSection()
    data: DataSection = DataSection()
    optimizer: OptimizerPolicy = OptimizerPolicy()
    train: TrainSection = TrainSection()
    layout: LayoutSection = LayoutSection()
    precision: PrecisionPolicy = PrecisionPolicy()
    memory: MemoryPolicy = MemoryPolicy()
    fsdp: FsdpPolicy = FsdpPolicy()
    islands: IslandsPolicy = IslandsPolicy()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    run: RunSection = RunSection()
    launch: LaunchSection = LaunchSection()


def keys(section: object) -> list[Field[Any]]:
    """Return the keys of a section: its own first, then those of the policies that it inherits.

    >>> [key.name for key in keys(ModelSection)]
    ['name', 'build', 'loss', 'call']
    """
    kind = section if isinstance(section, type) else type(section)
    own = [*vars(kind).get("__annotations__", {})]
    found = [key for key in fields(kind) if key.name != "arguments"]
    return sorted(found, key=lambda key: own.index(key.name) if key.name in own else len(own))
