"""Scripts of users, as texts, for the proof of whole scripts: right ones, and known mistakes.

Each begins with `HEAD`. RIGHT: name → (text, layouts). WRONG: name → `Mistake`.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """
import os, sys, torch, shoal
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

R, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3] * 2
DATA = TensorDataset(X[:40], Y[:40])

def block():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *more, *[block() for _ in range(3)], nn.Linear(8, 3))

def squares(o, y):
    return ((o - y) ** 2).sum(), len(y)

def whole(s):
    first = s * 8 % 64
    return X[first : first + 8], Y[first : first + 8]

def share(s):
    return tuple(t.chunk(N)[R] for t in whole(s))

def sgd(m):
    return torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)

def adamw(m):
    return torch.optim.AdamW(m.parameters(), lr=0.01)
"""

RIGHT: dict[str, tuple[str, tuple[str, ...]]] = {}


def right(name: str, *layouts: str):
    """Add a right script."""

    def add(text: str) -> None:
        RIGHT[name] = (HEAD + text, layouts)

    return add


right("own_shares", "ddp", "fsdp", "zero1")(
    """
run = shoal.parallelize(net(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), squares)
for s in range(6):
    run.step(share(s))
"""
)
right("loader", "ddp", "fsdp", "tp", "pp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, batch=16)
for epoch in run.epochs(3):
    for batch in run.loader(DATA):
        run.step(batch)
run.close()
"""
)
right("steps_of_a_dataset", "ddp", "zero2")(
    """
m = net(nn.Dropout(0.2))
run = shoal.parallelize(m, adamw(m), squares, batch=16, micro_batch=4)
for epoch in range(3):
    for result in run.steps(DATA):
        run.print(result.loss)
"""
)
right("written_out_passes", "ddp", "fsdp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), batch=16, micro_batch=4)
for epoch in range(2):
    for batch in run.loader(DATA):
        for micro in run.micro_batches(batch):
            loss = ((run.model(micro.inputs) - micro.targets) ** 2).sum()
            run.backward(loss, len(micro.targets))
            run.log(error=(loss.detach(), len(micro.targets)))
        run.update()
"""
)
right("two_halves", "ddp", "fsdp")(
    """
m = net()
o = sgd(m)
run = shoal.parallelize(m, o, squares)
for s in range(5):
    o.zero_grad()
    run.forward_backward(share(s))
    run.update()
"""
)
right("lambda_lr", "ddp", "fsdp", "pp")(
    """
m = net()
run = shoal.parallelize(m, adamw(m), squares, batch=8)
scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5 ** step)
for batch in run.loader(DATA):
    run.step(batch)
    scheduler.step()
"""
)
right("one_cycle", "ddp", "zero1")(
    """
m = net()
o = sgd(m)
run = shoal.parallelize(m, o, squares)
scheduler = torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8)
for s in range(8):
    run.step(share(s))
    scheduler.step()
"""
)
right("groups_without_decay", "zero2", "fsdp")(
    """
m = net()
parts = [[p for p in m.parameters() if p.dim() > 1], [p for p in m.parameters() if p.dim() == 1]]
o = torch.optim.AdamW([{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 0.003}], lr=0.01, weight_decay=0.0)
run = shoal.parallelize(m, o, squares)
for s in range(5):
    run.step(share(s))
"""
)
right("gan", "ddp", "fsdp")(
    """
torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
making = shoal.parallelize(maker, sgd(maker), batch=16)
judging = shoal.parallelize(judge, sgd(judge), batch=16)
def judged(scores, real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real), reduction="sum")
for epoch in range(2):
    for batch in making.loader(DATA):
        for micro in judging.micro_batches(batch):
            fakes = maker(torch.randn(len(micro.inputs), 4)).detach()
            judging.backward(judged(judge(micro.targets), 0.9) + judged(judge(fakes), 0.0), len(fakes))
        judging.update()
        for micro in making.micro_batches(batch):
            fakes = maker(torch.randn(len(micro.inputs), 4))
            making.backward(judged(judge(fakes), 1.0), len(fakes))
        making.update()
"""
)
right("dpo", "ddp", "fsdp")(
    """
import copy
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))
class Preference(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)
    def logs(self, model, ids):
        return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)
    def forward(self, chosen, rejected):
        a, b = (self.logs(self.policy, ids) - self.logs(self.reference, ids).detach() for ids in (chosen, rejected))
        return a - b
torch.manual_seed(0)
rows = [{"chosen": torch.randint(0, 8, (5,)), "rejected": torch.randint(0, 16, (5,))} for _ in range(40)]
m = Preference(Policy())
o = torch.optim.SGD(m.policy.parameters(), lr=0.1)
run = shoal.parallelize(m, o, lambda margin, _: -F.logsigmoid(0.1 * margin), batch=8, call="kwargs")
for batch in run.loader(rows):
    run.step(batch)
"""
)
right("contrastive", "ddp", "zero2")(
    """
class Candidates(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        return {"anchor": X[i], "candidates": X[torch.randint(64, (5,))]}
class Scores(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
    def forward(self, anchor, candidates):
        a, c = (F.normalize(self.encoder(one), dim=-1) for one in (anchor, candidates))
        return (c @ a[:, :, None]).squeeze(-1) / 0.1
def info_nce(scores, _):
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long), reduction="none")
m = Scores(net())
run = shoal.parallelize(m, sgd(m), info_nce, batch=8, call="kwargs")
for batch in run.loader(Candidates()):
    run.step(batch)
"""
)
right("lengths_that_vary", "ddp", "fsdp")(
    """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))
def pad(rows):
    longest = max(map(len, rows))
    ids = torch.stack([F.pad(r, (0, longest - len(r))) for r in rows])
    targets = torch.stack([F.pad(r, (0, longest - len(r)), value=-100) for r in rows])
    return ids, targets
drawn = torch.Generator().manual_seed(2)
rows = [torch.randint(0, 16, (3 + i % 5,), generator=drawn) for i in range(40)]
torch.manual_seed(0)
m = Words()
run = shoal.parallelize(m, adamw(m), batch=8, micro_batch=2)
for batch in run.loader(rows, collate=pad):
    run.step(batch)
"""
)
right("gradient_penalty", "ddp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), batch=8)
for batch in run.loader(DATA):
    for micro in run.micro_batches(batch):
        inputs = micro.inputs.requires_grad_()
        loss = ((run.model(inputs) - micro.targets) ** 2).sum()
        (slopes,) = torch.autograd.grad(loss, inputs, create_graph=True)
        run.backward(loss + 0.1 * slopes.square().sum(), len(inputs))
    run.update()
"""
)
right("average_of_weights", "ddp", "fsdp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, average=0.9)
for s in range(5):
    run.step(share(s))
    averaged = run.state_dict(average=True)
"""
)
right("dropout", "ddp", "fsdp", "tp", "pp")(
    """
m = net(nn.Dropout(0.3))
run = shoal.parallelize(m, sgd(m), squares, batch=16, micro_batch=4)
for epoch in range(2):
    for batch in run.loader(DATA):
        run.step(batch)
"""
)
right("batch_norm", "ddp", "zero2", "pp")(
    """
m = net(nn.BatchNorm1d(8))
run = shoal.parallelize(m, sgd(m), squares, batch=16, micro_batch=4)
for epoch in range(2):
    for batch in run.loader(DATA):
        run.step(batch)
"""
)
right("frozen_trunk", "ddp", "fsdp")(
    """
m = net()
m[1].requires_grad_(False)
run = shoal.parallelize(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1), squares)
for s in range(5):
    run.step(share(s))
"""
)
right("tied_weights", "ddp", "fsdp", "pp")(
    """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 8), nn.Sequential(block(), block()), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))
torch.manual_seed(0)
ids = torch.randint(0, 16, (40, 6))
m = Words()
run = shoal.parallelize(m, sgd(m), batch=8)
for batch in run.loader(TensorDataset(ids, ids)):
    run.step(batch)
"""
)
right("clipping", "ddp", "fsdp", "tp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, batch=8, clip=0.1)
for batch in run.loader(DATA):
    run.step(batch)
"""
)
right("two_counts", "ddp", "fsdp")(
    """
teacher = net().requires_grad_(False)
m = net(nn.Linear(8, 8))
rows = TensorDataset(X[:40], torch.arange(40) % 3)
run = shoal.parallelize(m, sgd(m), batch=8)
for batch in run.loader(rows):
    answers = run.total(sum(len(t) for _, t in batch.values))
    labels = max(1, run.total(sum(int((t > 0).sum()) for _, t in batch.values)))
    for micro in run.micro_batches(batch):
        logits = run.model(micro.inputs)
        soft = ((logits - teacher(micro.inputs)) ** 2).sum()
        kept = torch.where(micro.targets > 0, micro.targets, -100)
        hard = F.cross_entropy(logits, kept, ignore_index=-100, reduction="sum")
        run.backward(soft / answers + hard / labels)
    run.update()
"""
)
right("totals_of_own_batches", "ddp", "zero1")(
    """
m = net()
run = shoal.parallelize(m, sgd(m))
for s in range(5):
    x, y = share(s)
    n = run.total(len(y))
    for micro in run.micro_batches((x, y)):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum() / n)
    run.update()
"""
)
right("mixup", "ddp", "fsdp")(
    """
class Mixup(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        j, w = int(torch.randint(40, ())), torch.rand(())
        return w * X[i] + (1 - w) * X[j], w * Y[i] + (1 - w) * Y[j]
m = net()
run = shoal.parallelize(m, sgd(m), lambda o, y: (o - y) ** 2, batch=8)
for batch in run.loader(Mixup()):
    run.step(batch)
"""
)
right("an_unused_pooler", "ddp", "fsdp")(
    """
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pooler = net(), nn.Linear(3, 3)
    def forward(self, x):
        return self.body(x)
m = Pooled()
run = shoal.parallelize(m, adamw(m), squares)
for s in range(5):
    run.step(share(s))
"""
)
right("layerdrop", "ddp", "zero2")(
    """
class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.blocks, self.out = nn.Linear(6, 8), nn.ModuleList(block() for _ in range(3)), nn.Linear(8, 3)
    def forward(self, x):
        x = self.into(x)
        for one in self.blocks:
            if torch.rand(()) > 0.3:
                x = x + one(x)
        return self.out(x)
torch.manual_seed(0)
m = Drops()
run = shoal.parallelize(m, sgd(m), squares, batch=16, micro_batch=4)
for epoch in range(2):
    for batch in run.loader(DATA):
        run.step(batch)
"""
)
right("validation_between", "ddp", "fsdp", "pp")(
    """
m = net(nn.Dropout(0.2))
run = shoal.parallelize(m, sgd(m), squares, batch=8)
for batch in run.loader(DATA):
    run.step(batch)
    run.evaluate(TensorDataset(X[40:], Y[40:]))
"""
)
right("saves_between", "ddp", "fsdp")(
    """
m = net()
run = shoal.parallelize(m, adamw(m), squares, batch=8, folder="runs/x")
run.restore()
for batch in run.loader(DATA):
    run.step(batch)
    run.save()
    weights = run.state_dict()
    if run.rank == 0:
        torch.save(weights, "weights.pt")
"""
)
right("micro_batches_of_own", "ddp", "fsdp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, micro_batch=2)
for s in range(5):
    run.step(share(s))
"""
)
right("distributed_sampler", "ddp", "zero1")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares)
sampler = DistributedSampler(DATA, N, R)
scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in DataLoader(DATA, batch_size=10, sampler=sampler):
        run.step(tuple(batch))
    scheduler.step()
"""
)
right("weight_norm", "ddp", "fsdp")(
    """
m = net()
m[0] = nn.utils.parametrizations.weight_norm(m[0])
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    run.step(share(s))
"""
)
right("two_models", "ddp", "fsdp")(
    """
first, second = net(), net(nn.Dropout(0.1))
runs = [shoal.parallelize(first, sgd(first), squares), shoal.parallelize(second, adamw(second), squares)]
for s in range(5):
    for run in runs:
        run.step(share(s))
"""
)
right("weights_in_a_dict", "ddp")(
    """
class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, row):
        return self.body(row["inputs"])
def weighted(o, row):
    return (((o - row["targets"]) ** 2).sum(1) * row["weights"]).sum(), row["weights"].sum()
m = Weighted()
run = shoal.parallelize(m, sgd(m), weighted)
for s in range(5):
    x, y = share(s)
    run.step({"inputs": x, "targets": y, "weights": x[:, 0].abs() + 0.1})
"""
)
right("an_lstm", "ddp", "fsdp")(
    """
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
    def forward(self, x):
        return self.out(self.rnn(x.view(len(x), 2, 3))[0][:, -1])
torch.manual_seed(0)
m = Sequence()
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    run.step(share(s))
"""
)
right("few_steps", "ddp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares)
for s in range(2):
    run.step(share(s))
run.close()
"""
)
right("clamped_weights", "ddp", "fsdp")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    run.step(share(s))
    with torch.no_grad():
        for p in run.model.parameters():
            p.clamp_(-0.2, 0.2)
"""
)
right("inside_main", "ddp", "fsdp")(
    """
def main():
    m = net()
    run = shoal.parallelize(m, lambda p: torch.optim.SGD(p, lr=float(sys.argv[1]) if len(sys.argv) > 1 else 0.1), squares, "ddp", batch=8)
    try:
        for batch in run.loader(DATA):
            run.step(batch)
    except Exception:
        raise
    finally:
        run.print("done")
if __name__ == "__main__":
    main()
"""
)
right("float32_inside", "ddp", "fsdp")(
    """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.scale
m = net(Norm())
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    run.step(share(s))
"""
)


@dataclass(frozen=True)
class Mistake:
    """A wrong script.

    layout    under which it is wrong · ranks  it needs · step  of the first difference
    finds     parts of the text that names it
    revert    name of a mend in script_case.py that is reverted, or ""
    """

    text: str
    layout: str
    step: int
    finds: tuple[str, ...]
    ranks: int = 2
    revert: str = ""


WRONG: dict[str, Mistake] = {}


def wrong(name: str, layout: str, step: int, *finds: str, ranks: int = 2, revert: str = ""):
    """Add a wrong script."""

    def add(text: str) -> None:
        WRONG[name] = Mistake(HEAD + text, layout, step, finds, ranks, revert)

    return add


HEADS = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.trunk = nn.ModuleList(block() for _ in range(2))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2))
    def forward(self, pair):
        x, task = pair
        x = self.into(x)
        for one in self.trunk:
            x = x + one(x)
        return self.heads[int(task[0])](x)
torch.manual_seed(0)
m = Heads()
run = shoal.parallelize(m, sgd(m), squares, "fsdp", guards="off")
for s in range(5):
    x, y = share(s)
    run.step(((x, torch.full((len(x),), (s + R) % 2)), y))
"""
wrong("a1_heads_by_rank", "fsdp", 1, "heads.", revert="joined units")(HEADS)
wrong("a1_heads_by_rank_under_hsdp", "", 1, "heads.", ranks=4, revert="joined units")(
    HEADS.replace('"fsdp"', '{"dp_replicate": 2, "dp_shard": 2, "zero": 3}')
)
wrong("a1_layerdrop", "fsdp", 1, "blocks.", revert="joined units")(
    """
class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(block() for _ in range(3))
    def forward(self, x):
        x = self.into(x)
        dropped = int(torch.rand(()) * 3)  # one, so that all ranks gather as often
        for number, one in enumerate(self.blocks):
            if number != dropped:
                x = x + one(x)
        return self.out(x)
torch.manual_seed(0)
m = Drops()
run = shoal.parallelize(m, sgd(m), squares, "fsdp", guards="off")
for s in range(5):
    run.step(share(s))
"""
)
wrong("a2_experts_at_a_short_step", "", 2, "experts.3.", revert="counted passes of experts")(
    """
from shoal.data.loading.sample_order import permute
class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))
    def forward(self, x):
        mixed, stays = x, x.new_ones(8).index_fill(0, torch.tensor([0]), 0)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, 0] == number)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]) * stays)
        return mixed
torch.manual_seed(5)
m = nn.Sequential(nn.Sequential(Sorted(), Sorted()), nn.Linear(8, 3))
kinds = [number % 3 for number in range(18)]
for place in permute(range(16, 18), 18, 0, 0):
    kinds[int(place)] = 3  # the two samples of the last step
inputs = torch.randn(18, 8, generator=torch.Generator().manual_seed(3))
inputs[:, 0] = torch.tensor(kinds)
o = torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1)
run = shoal.parallelize(m, o, squares, {"dp_replicate": 2, "ep": 2}, batch=16, micro_batch=4, sample=(inputs[:3], inputs[:3, 1:4]))
for batch in run.loader(TensorDataset(inputs, inputs[:, 1:4] * 2)):
    run.step(batch)
"""
)
wrong("a3a_reentrant_checkpoint", "pp", 1, "computes a gradient", revert="reentrant checkpoints")(
    """
from torch.utils.checkpoint import checkpoint
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.blocks, self.out = nn.Linear(6, 8), nn.ModuleList(block() for _ in range(4)), nn.Linear(8, 3)
    def forward(self, x):
        x = self.into(x)
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=True)
        return self.out(x)
torch.manual_seed(0)
m = Deep()
run = shoal.parallelize(m, sgd(m), squares, "pp", batch=8, sample=(X[:4], Y[:4]), guards="off")
for batch in run.loader(DATA):
    run.step(batch)
"""
)
RANDOM = """
import random
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = block()
    def forward(self, x):
        return self.body(x) * (0.5 + random.random())
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.blocks, self.out = nn.Linear(6, 8), nn.ModuleList(Noisy() for _ in range(4)), nn.Linear(8, 3)
    def forward(self, x):
        x = self.into(x)
        for one in self.blocks:
            x = one(x)
        return self.out(x)
torch.manual_seed(0)
m = Deep()
run = shoal.parallelize(m, sgd(m), squares, "pp", batch=8, sample=(X[:4], Y[:4]))
for batch in run.loader(DATA):
    run.step(batch)
"""
right("random_in_a_block", "pp")(RANDOM)
wrong("a3b_random_in_a_block", "pp", 1, "the mean gradient", revert="keyed draws of the host")(
    RANDOM
)
wrong("a3c_buffer_of_the_root", "pp", 1, "calls")(
    """
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
        self.register_buffer("calls", torch.zeros(3))
    def forward(self, x):
        out = self.body(x)
        if self.training:
            self.calls += out.detach().mean(0)
        return out
m = Counts()
run = shoal.parallelize(m, sgd(m), squares, "pp", batch=8, sample=(X[:4], Y[:4]))
for batch in run.loader(DATA):
    run.step(batch)
"""
)
wrong(
    "a5_own_clipping",
    "ddp",
    1,
    "0.weight",
    "clip_grad_norm_, train.py:",
    revert="changes of gradients",
)(
    """
m = net()
run = shoal.parallelize(m, sgd(m), guards="off")
for s in range(5):
    for micro in run.micro_batches(share(s)):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), len(micro.targets))
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    run.update()
"""
)
wrong(
    "a5_hook_that_clips",
    "fsdp",
    1,
    "an optimizer step pre-hook (clip, train.py:",
    revert="changes of gradients",
)(
    """
m = net()
o = sgd(m)
def clip(optimizer, args, kwargs):
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
o.register_step_pre_hook(clip)
run = shoal.parallelize(m, o, squares, guards="off")
for s in range(5):
    run.step(share(s))
"""
)
wrong("a5_values_clamped", "zero1", 1, "weight", revert="changes of gradients")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), guards="off")
for s in range(5):
    for micro in run.micro_batches(share(s)):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), len(micro.targets))
        for p in m.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.5, 0.5)
    run.update()
"""
)
wrong("a5_noise_by_rank", "ddp", 1, "ranks hold another 0.weight", "changed .grad of")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), guards="off")
for s in range(5):
    for micro in run.micro_batches(share(s)):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), len(micro.targets))
    torch.manual_seed(R)
    for p in m.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.01)
    run.update()
"""
)
AFTER = """
m = net()
run = shoal.parallelize(m, sgd(m), batch=8, guards="off")
for batch in run.loader(DATA):
    for micro in run.micro_batches(batch):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), len(micro.targets))
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.update()
"""
for layout in ("zero1", "tp"):
    wrong(f"a5_clipping_after_the_loop_{layout}", layout, 1, "weight")(AFTER)
right("clipping_after_the_loop", "ddp", "zero1", "zero2", "fsdp", "tp")(
    AFTER.replace(', guards="off"', "")
)
wrong("a6_rate_of_the_second_group", "zero1", 2, "lr of group 1 of the optimizer is 0.2 (rank 1)")(
    """
m = net()
ps = list(m.parameters())
o = torch.optim.SGD([{"params": ps[:4]}, {"params": ps[4:], "lr": 0.05}], lr=0.1)
run = shoal.parallelize(m, o, squares, guards="off")
for s in range(5):
    run.step(share(s))
    if R == 1:
        o.param_groups[1]["lr"] = 0.2
"""
)
wrong(
    "a6_decay_of_one_rank", "fsdp", 2, "weight_decay of group 0 of the optimizer is 0.1 (rank 1)"
)(
    """
m = net()
o = adamw(m)
run = shoal.parallelize(m, o, squares, guards="off")
for s in range(5):
    run.step(share(s))
    if R == 1:
        o.param_groups[0]["weight_decay"] = 0.1
"""
)
wrong(
    "a6_betas_of_one_rank", "zero2", 2, "betas of group 0 of the optimizer is [0.8, 0.9] (rank 1)"
)(
    """
m = net()
o = adamw(m)
run = shoal.parallelize(m, o, squares, guards="off")
for s in range(5):
    run.step(share(s))
    if R == 1:
        o.param_groups[0]["betas"] = (0.8, 0.9)
"""
)
wrong("a7_data_replaced", "ddp", 2, "the mean gradient", "ranks hold another 1.0.weight")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, guards="off")
for s in range(5):
    run.step(share(s))
    if R == 1:
        m[1][0].weight.data = m[1][0].weight.data * 0.5
"""
)
DATA_REPLACED = """
m = net()
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    run.step(share(s))
    m[1][0].weight.data = m[1][0].weight.data * 0.5
"""
right("data_replaced", "fsdp")(DATA_REPLACED)
wrong("a7_data_lost", "fsdp", 2, "changed 1.0.weight", revert="weights in the user's hands")(
    DATA_REPLACED.replace("squares)", 'squares, guards="off")')
)
wrong("a7_state_zeroed", "fsdp", 2, "the weights", "changed optimizer.state of 1.0.weight")(
    """
m = net()
o = adamw(m)
w = m[1][0].weight
run = shoal.parallelize(m, o, squares, guards="off")
for s in range(5):
    run.step(share(s))
    if w in o.state:
        o.state[w]["exp_avg"].zero_()
"""
)
wrong("a7_layer_reset", "ddp", 2, "the mean gradient", "ranks hold another 1.0.weight")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, guards="off")
for s in range(5):
    run.step(share(s))
    torch.manual_seed(7 + R)
    m[1][0].reset_parameters()
"""
)
LAYER_RESET = """
m = net()
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    run.step(share(s))
    torch.manual_seed(7)
    m[1][0].reset_parameters()
"""
right("layer_reset", "fsdp")(LAYER_RESET)
wrong(
    "a7_layer_reset_in_rows", "fsdp", 2, "changed 1.0.weight", revert="weights in the user's hands"
)(LAYER_RESET.replace("squares)", 'squares, guards="off")'))
RESET_PARTS = """
m = net()
run = shoal.parallelize(m, sgd(m), squares, batch=8, guards="off")
for batch in run.loader(DATA):
    run.step(batch)
    torch.manual_seed(7)
    run.model[1][0].reset_parameters()
"""
right("layer_reset_in_parts", "tp")(RESET_PARTS.replace(', guards="off"', ""))
wrong(
    "a7_layer_reset_in_parts",
    "tp",
    2,
    "weights 1.0.",
    "changed 1.0.weight",
    revert="weights in the user's hands",
)(RESET_PARTS)
STATE_ZEROED = """
m = net()
o = adamw(m)
run = shoal.parallelize(m, o, squares)
for s in range(5):
    run.step(share(s))
    w = run.model[1][0].weight
    if w in o.state:
        o.state[w]["exp_avg"].zero_()
"""
right("state_zeroed", "ddp", "zero1", "zero2", "fsdp")(STATE_ZEROED)
for layout in ("zero1", "zero2", "fsdp"):
    wrong(
        f"a7_state_kept_{layout}",
        layout,
        2,
        "exp_avg of 1.0.weight",
        "changed optimizer.state of 1.0.weight",
        revert="state by weight",
    )(STATE_ZEROED.replace("squares)", 'squares, guards="off")'))
wrong("a7_layers_tied_later", "fsdp", 2, "2.0.weight")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, guards="off")
for s in range(5):
    run.step(share(s))
    run.model[2][0].weight = run.model[1][0].weight
"""
)
wrong("a7_hook_in_a_split_layer", "tp", 1, "weight", revert="checked splits")(
    """
m = net()
m[1][2].register_full_backward_pre_hook(lambda layer, g: (g[0] / (1 + g[0].norm()),))
run = shoal.parallelize(m, sgd(m), squares, batch=8, guards="off")
for batch in run.loader(DATA):
    run.step(batch)
"""
)
wrong("a7_normed_weights", "tp", 2, "the weights")(
    """
m = net()
run = shoal.parallelize(m, sgd(m), squares, batch=8, guards="off")
for batch in run.loader(DATA):
    run.step(batch)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            if p.dim() == 2:
                p.div_(p.norm())
"""
)
wrong(
    "a8_class_weights_by_rank",
    "ddp",
    1,
    "the mean gradient of",
    "reads W, which is another on ranks 0 and 1",
)(
    """
m = net()
W = torch.rand(3, generator=torch.Generator().manual_seed(R))
def weighted(o, y):
    return F.cross_entropy(o, y, weight=W, reduction="sum"), W[y].sum()
run = shoal.parallelize(m, sgd(m), weighted)
labels = torch.arange(64) % 3
for s in range(5):
    x = share(s)[0]
    run.step((x, labels[: len(x)]))
"""
)
wrong("a8_temperature", "ddp", 2, "temperature, which an optimizer of no run steps", "stepped SGD")(
    """
m = net()
temperature = nn.Parameter(torch.ones(()))
to = torch.optim.SGD([temperature], lr=0.01)
def scaled(o, y):
    return F.cross_entropy(o * temperature, y, reduction="sum"), len(y)
run = shoal.parallelize(m, sgd(m), scaled)
labels = torch.arange(64) % 3
for s in range(5):
    x = share(s)[0]
    run.step((x, labels[R : R + len(x)]))
    to.step()
    to.zero_grad()
"""
)


REFUSED: dict[str, tuple[str, str, str]] = {
    "cut_by_rank": (
        HEAD
        + """
m = net()
run = shoal.parallelize(m, sgd(m), squares, sample=whole(0))
for s in range(5):
    run.step(share(s))
""",
        "tp",
        "the script cuts its batches by rank",
    ),
    "own_collective": (
        HEAD
        + """
m = net()
run = shoal.parallelize(m, sgd(m), squares)
for s in range(5):
    x, y = share(s)
    torch.distributed.all_reduce(x)
    run.step((x, y))
""",
        "ddp",
        "calls torch.distributed.all_reduce, for which one process has no other ranks",
    ),
    "unknown_objects": (
        HEAD
        + """
class Row:
    def __init__(self, x, y): self.x, self.y = x, y
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, row): return self.body(row["row"].x.double())
m = Net()
run = shoal.parallelize(m, sgd(m), lambda o, row: squares(o, row["row"].y))
for s in range(5):
    run.step({"x": share(s)[0], "row": Row(*share(s))})
""",
        "ddp",
        "a micro-batch holds a Row",
    ),
    "no_step": (HEAD + "m = net()\nshoal.parallelize(m, sgd(m), squares)\n", "ddp", "took no step"),
}  # fmt: skip
"""Name → (script, layout, part of the reason why it cannot be proven)."""
