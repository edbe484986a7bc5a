"""A policy learns by PPO to keep balls on top of a hill: rollouts of its own, updates on each.

Shows: rollouts by run.predict, each rank with balls of its own; advantages scaled by mean and
deviation over all ranks (run.total); two losses of a step, by two backward calls.
Start: python examples/ppo.py [FOLDER], and again to go on where it was
   or: python -m torch.distributed.run --nproc-per-node 2 examples/ppo.py [FOLDER]
"""

import sys

import torch
from torch import nn

import shoal

ROUNDS = 3 if "--short" in sys.argv else 10
BALLS, TIMES, UPDATES, GAMMA, CLIP = 64, 32, 8, 0.95, 0.2
folder = next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/ppo")
if "--float64" in sys.argv:  # to compare layouts to the last digits
    torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
HILL = torch.tensor([[1.0, 0.1], [0.1, 1.0]])  # of place and speed, from time to time
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))  # two odds, and a value
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
run = shoal.parallelize(model, adam, clip=0.5, folder=folder)
run.restore()
for number in range(run.step_count // UPDATES, ROUNDS):
    drawn = torch.Generator().manual_seed(number)  # for all balls, whoever rolls them
    draws = torch.rand(TIMES + 1, BALLS, 3, generator=drawn)[:, run.world.rank :: run.world.size]
    starts, chance = draws[..., :2] - 0.5, draws[..., 2]
    states, rows = starts[-1], []
    for time in range(TIMES):
        outputs = run.predict(states)
        odds = outputs[:, :2].log_softmax(1)
        moves = (chance[time] < odds[:, 1].exp()).long()
        new = states @ HILL + torch.stack([0 * moves, 0.2 * moves - 0.1], 1)
        on = new[:, 0].abs() < 1
        rows.append((states, moves, odds.gather(1, moves[:, None])[:, 0], outputs[:, 2], on))
        states = torch.where(on[:, None], new, starts[time])
    seen, moves, old, values, on = map(torch.stack, zip(*rows, strict=True))
    gains, after = torch.empty_like(values), run.predict(states)[:, 2]
    for time in reversed(range(TIMES)):
        gains[time] = after = on[time] * (0.05 + GAMMA * after)
    gap, count = gains - values, run.total(gains.numel())
    gap = gap - run.total(gap.sum()) / count
    gap = gap / (run.total(gap.square().sum()) / count) ** 0.5
    share = [one.flatten(0, 1) for one in (seen, moves, old, gap, gains)]
    for _ in range(UPDATES):
        for micro in run.micro_batches(share):
            seen, moves, old, gap, gains = micro.inputs
            outputs = run.model(seen)
            ratio = (outputs[:, :2].log_softmax(1).gather(1, moves[:, None])[:, 0] - old).exp()
            gain = torch.minimum(ratio * gap, ratio.clamp(1 - CLIP, 1 + CLIP) * gap)
            run.backward(-gain.sum(), len(seen), retain_graph=True)
            run.backward((outputs[:, 2] - gains).square().sum())
        result = run.update()
    falls = run.total((~on).sum()) / BALLS  # before they know what these updates taught
    run.save()
run.print(f"loss {result.loss!r}, a ball falls {falls:.2f} times in {TIMES} pushes")
run.close()
