"""How long validation takes in micro-batches of training's size, and in those that the plan knows.

Two processes with one thread each: a Llama of 32 narrow layers under tp = 2, the same held-out
samples both ways, in turns. CPU seconds of the busier rank; both losses are told in full.

    python benchmarks/validating.py                       about two minutes
    python benchmarks/validating.py --layers 2 --samples 64    does it work?

Gate: ≤ 0.4 of the CPU seconds, the loss equal to the printed digit (four decimals).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import machine, run_together

LIMIT, PROCESSES, ROUNDS = 0.4, 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="one JSON line after the table")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(json.loads(options.rank_of))
        return
    job: dict[str, Any] = {"layers": options.layers, "samples": options.samples}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = str(Path(folder) / "cache")
        out = Path(folder) / "out.json"
        command = [__file__, "--rank-of", json.dumps({**job, "out": str(out)})]
        run_together(command, PROCESSES, deadline_s=900)
        record = {"machine": machine(), **job, **json.loads(out.read_text())}
    for row in record["rows"]:
        print(
            f"{row['micro_batch']:4} at a time  {min(row['cpu_s']):7.2f} CPU-s  "
            f"{min(row['wall_s']):7.2f} s  loss {row['loss']!r}"
        )
    verdict = "pass" if record["ratio"] <= LIMIT and record["same_digits"] else "FAIL"
    print(f"ratio of CPU seconds {record['ratio']:.2f}   {verdict} (≤ {LIMIT})")
    if options.json:
        print(json.dumps(record))


def work(job: dict[str, Any]) -> None:
    """One rank."""
    from shoal.base.runlog.atomic_files import cache_folder
    from shoal.config.load import load_config
    from shoal.data.digits import EvenSubset
    from shoal.data.sources import open_source
    from shoal.fabric import start_world
    from shoal.machine.measure import QUICK, measure_machine
    from shoal.trainer.jobs.configured_run import open_run
    from shoal.trainer.jobs.run_forecast import describe_local_cluster, forecast_run

    overrides = (
        f"model.dim=64 model.layers={job['layers']} data.source=synthetic data.sequence=64 "
        "train.batch=8 train.micro_batch=2 train.steps=4"
    )
    config = load_config(None, overrides.split()).config
    world = start_world()
    source = open_source(config.data, 0)
    measure_machine(world, cache_folder(), QUICK)
    run = open_run(config, source, world, {"tp": PROCESSES})
    foreseen = forecast_run(
        config, source, run.plan, describe_local_cluster(world.size), run.program.travel
    )
    large = world.broadcast_json(foreseen.get("validation_micro_batch"))
    data = EvenSubset(source.train, job["samples"], True)
    rows = {size: {"cpu_s": [], "wall_s": []} for size in (run.plan.micro_batch, large)}
    for size in rows:  # what is traced once per shape is in nobody's time
        run.evaluate(run.feed.held_out_batches(EvenSubset(data, size, True), 0, None, size))
    for _ in range(ROUNDS):
        for size, row in rows.items():
            world.barrier()
            began_s, cpu_s = time.perf_counter(), time.process_time()
            values = run.evaluate(run.feed.held_out_batches(data, 0, None, size))
            row["wall_s"].append(time.perf_counter() - began_s)
            row["cpu_s"].append(max(world.gather_json(time.process_time() - cpu_s)))
            row["loss"] = values["loss"]
    if world.is_first:
        told = [{"micro_batch": size, **row} for size, row in rows.items()]
        small, big = told[0], told[-1]
        record = {
            "rows": told,
            "ratio": min(big["cpu_s"]) / min(small["cpu_s"]),
            "same_digits": f"{small['loss']:.4f}" == f"{big['loss']:.4f}",
        }
        Path(job["out"]).write_text(json.dumps(record))
    run.close()


if __name__ == "__main__":
    main()
