"""Settings of one run of a script in its proof: JSON that the command writes and a worker reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ScriptSide:
    """One run of a script: under a layout, or alone on recorded micro-batches.

    Attributes:
        script: path of the script, in the copy of its folder.
        cwd: working folder, in the copy.
        words: the script's own arguments.
        record: folder of this run's record.
        writable: further folders to which the script may write.
        steps: optimizer steps after which the script ends.
        processes: of the layout; the one process shows the script the same number.
        layout: replaces the script's own; "": the script's own.
        batches: record of a layout whose micro-batches the one process gets; "": this is a layout.
        sample: record whose first micro-batch is the missing `sample=` of `shoal.parallelize`; "":
            there is none.
        compared: records of layouts that this one process is compared with.
        lifted: the script's own casts to narrower formats are lifted.
        jitter: every weight is changed in its last bits, which shows what rounding does.
    """

    script: str
    cwd: str
    record: str
    words: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    steps: int = 4
    processes: int = 2
    layout: str = ""
    batches: str = ""
    sample: str = ""
    compared: tuple[str, ...] = field(default=())
    lifted: bool = False
    jitter: bool = False

    @property
    def is_alone(self) -> bool:
        """Return whether this is the run on a single process, without a layout."""
        return bool(self.batches)

    @staticmethod
    def read(path: Path) -> ScriptSide:
        """Read the settings that `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return ScriptSide(**{**values, **lists})

    def write(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
