"""A policy learns by PPO to keep balls on top of a hill: rollouts of its own, updates on each."""

import sys

import torch
from torch import nn

ROUNDS = 3 if "--short" in sys.argv else 10
BALLS, TIMES, UPDATES, GAMMA, CLIP = 64, 32, 8, 0.95, 0.2
if "--float64" in sys.argv:  # to compare layouts to the last digits
    torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
HILL = torch.tensor([[1.0, 0.1], [0.1, 1.0]])  # of place and speed, from time to time
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))  # two odds, and a value
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
for number in range(ROUNDS):
    drawn = torch.Generator().manual_seed(number)
    draws = torch.rand(TIMES + 1, BALLS, 3, generator=drawn)
    starts, chance = draws[..., :2] - 0.5, draws[..., 2]
    states, rows = starts[-1], []
    for time in range(TIMES):
        with torch.no_grad():
            outputs = model(states)
        odds = outputs[:, :2].log_softmax(1)
        moves = (chance[time] < odds[:, 1].exp()).long()
        new = states @ HILL + torch.stack([0 * moves, 0.2 * moves - 0.1], 1)
        on = new[:, 0].abs() < 1
        rows.append((states, moves, odds.gather(1, moves[:, None])[:, 0], outputs[:, 2], on))
        states = torch.where(on[:, None], new, starts[time])
    seen, moves, old, values, on = map(torch.stack, zip(*rows, strict=True))
    gains = torch.empty_like(values)
    with torch.no_grad():
        after = model(states)[:, 2]
    for time in reversed(range(TIMES)):
        gains[time] = after = on[time] * (0.05 + GAMMA * after)
    gap = gains - values
    gap = (gap - gap.mean()) / gap.std(correction=0)
    seen, moves, old, gap, gains = (one.flatten(0, 1) for one in (seen, moves, old, gap, gains))
    for _ in range(UPDATES):
        outputs = model(seen)
        ratio = (outputs[:, :2].log_softmax(1).gather(1, moves[:, None])[:, 0] - old).exp()
        gain = torch.minimum(ratio * gap, ratio.clamp(1 - CLIP, 1 + CLIP) * gap)
        loss = -gain.mean() + (outputs[:, 2] - gains).square().mean()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
    falls = (~on).sum() / BALLS  # before they know what these updates taught
print(f"loss {loss.item()!r}, a ball falls {falls:.2f} times in {TIMES} pushes")
