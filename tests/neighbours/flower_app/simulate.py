"""Simulate the app with FedAvg, and write the merged weights: `python simulate.py FOLDER OUT JSON`.

FOLDER   holds client_app.py and task.py; JSON: clients, rounds, share, epochs, batch, lr
"""

from __future__ import annotations

import json
import sys

sys.path.insert(0, sys.argv[1])

import torch
from client_app import app as client
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import Net

ASKED = json.loads(sys.argv[3])
server = ServerApp()


@server.main()
def main(grid, context) -> None:
    """Run all rounds; no evaluation."""
    torch.manual_seed(0)
    share, clients = ASKED["share"], ASKED["clients"]
    strategy = FedAvg(
        fraction_train=share, fraction_evaluate=0.0,
        min_train_nodes=max(1, round(share * clients)), min_available_nodes=clients,
    )  # fmt: skip
    config = ConfigRecord(
        {"lr": ASKED["lr"], "epochs": ASKED["epochs"], "batch-size": ASKED["batch"]}
    )
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), train_config=config,
        num_rounds=ASKED["rounds"],
    )  # fmt: skip
    losses = {str(k): dict(v) for k, v in result.train_metrics_clientapp.items()}
    torch.save({"weights": result.arrays.to_torch_state_dict(), "metrics": losses}, sys.argv[2])


run_simulation(
    server_app=server, client_app=client, num_supernodes=ASKED["clients"],
    backend_config={"client_resources": {"num_cpus": ASKED.get("cpus", 1), "num_gpus": 0.0}},
)  # fmt: skip
