"""The app's client: one message in, the trained weights out."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data
from task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received weights on this client's images."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    config = msg.content["config"]
    partition, partitions = (context.node_config[k] for k in ("partition-id", "num-partitions"))
    loader = load_data(partition, partitions, config["batch-size"])
    loss = train_fn(model, loader, config["epochs"], config["lr"], torch.device("cpu"))
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)
