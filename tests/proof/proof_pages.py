"""Pages of docs/proof/ whose figures are those of proof/results/: verdict, report, owners.

    python tests/proof/proof_pages.py [verdict] [report] [owners]     write docs/proof/NAME.md; default: all

`make proof` runs it after the programs that measure. It measures nothing itself.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGES = ROOT / "proof" / "results", ROOT / "docs" / "proof"
LIMITS = {
    "steps-100k-ranks-8": "400 kB",
    "steps-10k-ranks-1024": "1.5 MB, 5 CPU s, 300 MiB",
    "steps-1m-ranks-1": "5 CPU s, 300 MiB",
    "several-20": "1.5 MB, 10 CPU s, 300 MiB",
}
"""Limits that the measuring programs check; other pages have none."""


def verdict_page() -> str:
    """Return the page on verdicts."""
    record = read("verdicts.json")
    trials = record["trials"]
    planted = {name: one for name, one in trials.items() if not name.startswith("clean ")}
    clean = [one for name, one in trials.items() if name.startswith("clean ")]
    errors = sorted(abs(one["error"]) for one in planted.values() if "error" in one)
    right = sum(not one["wrong"] for one in planted.values())
    middle = f", {errors[len(errors) // 2]:.1%} in the middle" if errors else ""
    largest = f"{errors[-1]:.1%} at most{middle}" if errors else "none measured"
    rows = [
        f"| {name} | `{one['planted']}` | {cell(one['told'][-1])} | {milliseconds(one)} | "
        f"{format_error(one)} | {'no' if one['wrong'] else 'yes'} |"
        for name, one in planted.items()
    ]
    return "\n".join(
        [
            "# Verdicts: is the cause named, and its cure foretold?",
            "",
            "This page shows how far you can trust the [verdict](../reference/verdict.md) on a run.",
            "",
            "    make proof PART=verdicts",
            "",
            "## Method",
            "",
            "Each trial plants one cost or fault into a run of two ranks, by sleeps of a drawn length. The verdict reads",
            "the run's folder. Then the same run is made without the cost: by the verdict's own command where a setting",
            f"cures it, else by taking the sleep out. Both runs are made {record['repeats']} times, by turns.",
            "",
            "A trial is right if the verdict on every planted run has its kind, and its rank or part. Besides, the mean step after the",
            "cure lies within 15 % of the mean that the verdicts foretold. The verdict on a clean run must be “nothing to gain”, or",
            "that the machine is busy. Every second clean run has one core busy with other work.",
            "",
            "## Figures",
            "",
            f"{date_of('verdicts.json')}, seed {record['seed']}, {machine_text(record)}. Sources, by trials made with them: "
            + ", ".join(f"{count} {source}" for source, count in record["sources"].items())
            + ".",
            "",
            f"**{right} of {len(planted)} planted costs and faults right, {sum(not o['wrong'] for o in clean)} of "
            f"{len(clean)} clean runs.** Difference of the foretold step from the measured one: {largest}, over "
            f"{len(errors)} cures.",
            "",
            "| planted | kind | verdict on the last run | foretold → measured, means, ms | difference | right |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "Each trial with its sizes and seconds: [verdicts.json](../../proof/results/verdicts.json).",
            "",
            *traceml_section(),
        ]
    )


def traceml_section() -> list[str]:
    """Return the verdicts of TraceML beside ours, as lines; none before they were taken."""
    if not (RESULTS / "traceml.json").exists():
        return []
    record = read("traceml.json")
    free_ms = record["rows"]["nothing"]["shoal"]["step_s"] * 1e3
    rows = []
    for name, row in record["rows"].items():
        without_s = row["shoal"]["without_s"]
        foretold = (
            f"{without_s * 1e3:.0f} → {free_ms:.0f}" if without_s and name != "nothing" else "–"
        )
        ours = row["shoal"]["told"].partition("; without it")[0]
        theirs = row["traceml"]["told"].removeprefix("Verdict: ").partition(" Next: ")[0]
        rows.append(f"| {name} | {cell(ours)} | {foretold} | {cell(theirs)} |")
    return [
        "## Beside TraceML",
        "",
        "    make proof PART=traceml",
        "",
        f"[TraceML](https://pypi.org/project/traceml-ai/) {record['traceml']} watches a loop in plain PyTorch: two ranks, "
        "DistributedDataParallel.",
        "Shoal trains the same model on the same samples with `shoal.parallelize`. Both get the same sleeps.",
        "The step measured is that of Shoal's run without a cost.",
        "",
        f"{date_of('traceml.json')}, seed {record['seed']}, {machine_text(record)}, source {record['source']}.",
        "",
        "| planted | Shoal | step without it: foretold → measured, ms | TraceML |",
        "|---|---|---|---|",
        *rows,
        "",
        "TraceML names no step without the cost. Its summaries: [traceml.json](../../proof/results/traceml.json).",
        "",
    ]


WRONG_ORDER = ("mean", "scaffold", "median", "trimmed")
"""Merges, as the tables of the page of owners list them."""


def owners_page() -> str:
    """Return the page on owners with unlike data."""
    record = read("owners.json")
    figures, trials = record["figures"], record["trials"]
    rounds = [
        f"| {model} | {', '.join(map(str, one['fedavg'])) or '–'} | "
        f"{', '.join(map(str, one['scaffold'])) or '–'} | {one['wins']} |"
        for model, one in figures["rounds"].items()
    ]
    splits = [
        f"| {name} | {one['seeds']} | {percent(one['accuracy'])} | {one['least']:.1%} | {one['refused']} |"
        for name, one in figures["splits"].items()
    ]
    wrong = [
        f"| {name} | {percent(one['accuracy'])} | {one.get('mean_lost', '–')} | "
        f"{max(one['lost_points']) if 'lost_points' in one else '–'} |"
        for name, one in figures["wrong"].items()
    ]
    few = [
        f"| {name} | {' | '.join(percent(row[number]) for number in ('3', '10'))} |"
        for name, row in figures["few"].items()
    ]
    dirichlet, labels = (
        [
            f"| {'mean, SCAFFOLD' if merge == 'scaffold' else merge} | {fault} | "
            f"{' | '.join(percent(row[key]) for key in ('accuracy', 'others', 'own'))} | "
            f"{row['mean_lost']} | {max(row['lost_points'])} |"
            for (found, merge, fault), row in sorted(
                ((name.split(), row) for name, row in figures["unlike"].items()),
                key=lambda one: (WRONG_ORDER.index(one[0][1]), one[0][2]),
            )
            if found == split
        ]
        for split in ("dirichlet:0.1", "labels:2")
    )
    head = [
        "| merge | fault | accuracy | of the four others | of the wrong one | mean points lost | most, one seed |",
        "|---|---|---|---|---|---|---|",
    ]
    total = 219
    missing = total - len(trials)
    state = (
        f"**{missing} of {total} trials are not made yet.**"
        if missing
        else f"All {total} trials are made."
    )
    fallen = "; ".join(figures["fallen"]) or "not complete"
    gates = "; ".join(record["missed"]) or "none"
    return "\n".join(
        [
            "# Owners with unlike data: which method, and what if one is wrong?",
            "",
            "This page shows what SCAFFOLD, robust merges and admission do on real runs of [owners](../start/owners.md).",
            "",
            "    make proof PART=owners",
            "",
            "## Method",
            "",
            "Each trial is the main job of `shoal train` on scikit-learn's digits, in one process. A fifth of the images is",
            "held out. Thresholds, seeds and settings were committed before the first trial: `tests/proof/owners_gates.toml`.",
            "",
            "The two methods are FedAvg and SCAFFOLD. Both have the same inner optimizer: SGD at a constant rate, which is 0.5 with",
            "100 owners of the logistic regression, and 0.1 with five owners.",
            "",
            "The wrong owner is the last of five. A program outside of `shoal train` makes it wrong; [owners](../start/owners.md#one-owner-may-be-wrong)",
            "shows how to do so without the program. *Reversed*: it sends its change of the weights times −1. *Permuted*: it",
            "learns each digit under the name of another digit, and its held-out images keep their true labels.",
            "[Admission](../how-it-works/islands.md#an-island-whose-change-does-not-count) refuses changes that are far longer than those of past rounds. It is off here.",
            "",
            "The first CNN (`cnn`) was a badly chosen experiment: at its rate of 0.2 no run reaches the accuracy, and SCAFFOLD stays",
            "at chance. A program without Shoal shows the same (`tests/proof/owner_rates.py`). Its rows stay here as they fell",
            f"({fallen}). A second CNN (`groupnorm`) has GroupNorm and the rate that suits FedAvg best. Its gate was",
            "committed before its first trial. It changed once, after six runs that had a warm-up: `tests/proof/owners_gates_second.toml`.",
            "",
            "## Figures",
            "",
            f"{date_of('owners.json')}, {machine_text(record)}. {state} Gates that are not met: {gates}. Sources: "
            + ", ".join(f"{count} {source}" for source, count in record["sources"].items())
            + ".",
            "",
            "Rounds until the accuracy, by seed: 100 owners of one label each, 20 drawn (logistic 90 %, CNNs 85 %).",
            "61 means: not in 60 rounds.",
            "",
            "| model | FedAvg | SCAFFOLD | SCAFFOLD first |",
            "|---|---|---|---|",
            *rounds,
            "",
            "Accuracy after 30 rounds of the logistic regression, with 95 % intervals over the seeds.",
            "",
            "| split, method | seeds | accuracy | least | owners refused |",
            "|---|---|---|---|---|",
            *splits,
            "",
            "One of five owners wrong, ten rounds of one epoch, logistic regression, rate 0.1, batch 16, five seeds. The owners are alike: each has a fifth of the images, dealt",
            "evenly (`data.split=even`). Points lost are those beside the same merge with five right owners.",
            "",
            "| merge, fault | accuracy | mean points lost | most, one seed |",
            "|---|---|---|---|",
            *wrong,
            "",
            "The same with unlike owners, and without a gate: the images are dealt by `data.split=dirichlet:0.1`. Points lost",
            "are those beside the mean of five right owners. **The mean loses least, also with a wrong owner.** A median",
            "takes the middle of five weights that differ since the owners know different digits.",
            "",
            *head,
            *dirichlet,
            "",
            "The same with `data.split=labels:2`: each owner has two digits, which no other owner has.",
            "**The wrong owner's digits are lost with every merge**, since no other owner knows them. On the digits of the other",
            f"four, SCAFFOLD loses {lost_by_others(figures, 'scaffold'):.1f} points beside itself with right owners, and FedAvg {lost_by_others(figures, 'mean'):.1f}.",
            "",
            *head,
            *labels,
            "",
            "Few rounds, or many passes in each: five right owners that all train, by FedAvg or SCAFFOLD, with the mean as merge.",
            "Logistic regression, rate 0.1, batch 16, three seeds (least … largest). The deals are those of the last two tables.",
            "",
            "| split, method, round | after 3 rounds | after 10 rounds |",
            "|---|---|---|",
            *few,
            "",
            "The settings of the last three tables were committed before the first trial of each: `tests/proof/owners_unlike.toml`.",
            "",
            "Each trial with its curve: [owners.json](../../proof/results/owners.json).",
            "",
        ]
    )


def lost_by_others(figures: dict[str, Any], choice: str) -> float:
    """Return the points that one wrong owner of five costs on the digits of the other four."""
    none, permuted = (
        figures["unlike"][f"labels:2 {choice} {fault}"]["others"][0]
        for fault in ("none", "permuted")
    )
    return 100 * (none - permuted)


def percent(ends: list[float]) -> str:
    """Return a mean with its interval."""
    mean, low, high = ends
    return f"{mean:.1%} ({low:.1%} … {high:.1%})"


def report_page() -> str:
    """Return the page on reports."""
    one, several = read("report.json"), read("comparison.json")
    wrong = [*one["wrong"], *several["wrong"]]
    pages = {**one["pages"], **several["pages"]}
    views = sum(len(row.get("seen", {})) for row in pages.values())
    rows = [
        f"| {name} | {row['bytes'] / 1e3:.0f} kB | {row['cpu_s']} | {row['memory_mib']} MiB | "
        f"{len(row.get('seen', {}))} | {LIMITS.get(name, '–')} |"
        for name, row in pages.items()
    ]
    return "\n".join(
        [
            "# Reports: do they open, from a disk and without network?",
            "",
            "This page shows how the [report](../reference/report.md) of a run was checked, and what it costs.",
            "",
            "    make proof PART=report",
            "",
            "## Method",
            "",
            "A program makes run folders of known size, and one with 200 hostile strings at every place of a text. The other",
            "folders are those of older versions. Each page is written by a process of its own, which measures itself.",
            "",
            "Headless Chromium opens each page from a disk, without network: 1280 and 390 pixels wide, light and dark, and",
            "without JavaScript. Each view must have a verdict, tables and curves. It must make no request, write nothing",
            "to the console, scroll in one direction alone, and run no script of the folder.",
            "",
            "## Figures",
            "",
            f"{date_of('report.json')}, {one['chromium'] or 'no Chromium: pages were not opened'}, source of "
            f"`src/shoal/report` {one['source']}. **{len(pages)} pages in {views} views, {len(wrong)} of them wrong.**",
            "",
            "| page | size | CPU s | memory | views | limit |",
            "|---|---|---|---|---|---|",
            *rows,
            *(["", *(f"- wrong: {cell(line)}" for line in wrong)] if wrong else []),
            "",
            "What was seen in each view: [report.json](../../proof/results/report.json),",
            "[comparison.json](../../proof/results/comparison.json).",
            "",
        ]
    )


def read(name: str) -> dict[str, Any]:
    """Return a result."""
    return dict(json.loads((RESULTS / name).read_text(encoding="utf-8")))


def date_of(name: str) -> str:
    """Return the day of a result: of its commit, or today if it was changed since."""
    path = str(RESULTS / name)

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words, "--", path], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return today if git("status", "--porcelain") else git("log", "-1", "--format=%cs") or today


def machine_text(record: dict[str, Any]) -> str:
    """Return processor, cores, load and torch of a result."""
    machine = record["machine"]
    load = machine["load_average"][0]
    torch = machine["versions"]["torch"]
    return f"{machine['cores']} cores of {machine['processor']} (load {load:.0f}), torch {torch}"


def milliseconds(trial: dict[str, Any]) -> str:
    """Return the foretold and the measured means of a trial; "–" for faults."""
    if "error" not in trial:
        return "–"
    means = [sum(trial[key]) / len(trial[key]) * 1e3 for key in ("predicted_s", "measured_s")]
    return " → ".join(f"{mean:.0f}" for mean in means)


def format_error(trial: dict[str, Any]) -> str:
    return f"{trial['error']:+.1%}" if "error" in trial else "–"


def cell(text: str) -> str:
    """Return a text as it may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


PROOF_PAGES: dict[str, Callable[[], str]] = {
    "verdict": verdict_page, "report": report_page, "owners": owners_page
}  # fmt: skip


def main() -> int:
    """Write the pages that the command line names."""
    for name in sys.argv[1:] or PROOF_PAGES:
        (PAGES / f"{name}.md").write_text(PROOF_PAGES[name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
