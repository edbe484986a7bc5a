"""Images by a CNN with BatchNorm: the loader of initialize, arguments of the launcher, a tag for each epoch.

python cifar_like.py --deepspeed [--resume]
"""

import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(6 * 9, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--resume", action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def images(count, seed):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=draws)
    return torch.utils.data.TensorDataset(x, (x.mean((2, 3)) > 0).long().sum(1))


def test(engine, testset, device):
    loader = torch.utils.data.DataLoader(testset, batch_size=4, shuffle=False)
    correct, total, loss = 0, 0, 0.0
    engine.eval()
    with torch.no_grad():
        for x, y in loader:
            outputs = engine(x.to(device))
            correct += (outputs.argmax(1) == y.to(device)).sum().item()
            loss += F.cross_entropy(outputs, y.to(device), reduction="sum").item()
            total += len(y)
    engine.train()
    if engine.global_rank == 0:
        print(f"accuracy {100 * correct / total} loss {loss / total}")


def main(args):
    deepspeed.init_distributed()
    local_rank = max(args.local_rank, 0)
    get_accelerator().set_device(local_rank)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    trainset, testset = images(72, 0), images(30, 1)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    ds_config = {
        "train_batch_size": 8,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 0},
    }
    engine, _optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=ds_config
    )
    device = get_accelerator().device_name(engine.local_rank)
    criterion = nn.CrossEntropyLoss()
    first = 0
    if args.resume:
        path, client = engine.load_checkpoint("cifar")
        first = client["epoch"] + 1
        print(f"resumed {path} at {engine.global_steps}") if engine.global_rank == 0 else None
    for epoch in range(first, first + args.epochs):
        running_loss = 0.0
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(device), data[1].to(device)
            outputs = engine(inputs)
            loss = criterion(outputs, labels)
            engine.backward(loss)
            engine.step()
            running_loss += loss.item()
            if engine.global_rank == 0 and i % 3 == 2:
                print(f"[{epoch + 1} {i + 1}] loss: {running_loss / 3} lr {engine.get_lr()[0]}")
                running_loss = 0.0
        test(engine, testset, device)
        engine.save_checkpoint("cifar", tag=f"epoch{epoch}", client_state={"epoch": epoch})
    if engine.global_rank == 0:
        torch.save(engine.module.state_dict(), "cifar_net.pth")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(add_argument())
