"""No habit trains other numbers than plain PyTorch without a line; most are right.

`make proof PART=habits` measures every cell (`tests/proof/habit_matrix.py`); here are some cheap ones.
"""

from __future__ import annotations

from habits.habit_table import LAYOUTS, table

FEW = 60


def test_the_table_has_habits_of_every_kind() -> None:
    assert len(table()) >= FEW
    assert {one.kind for one in table().values()} == {
        *("losses", "gradients", "optimizer", "weights", "models", "loops")
    }
    assert len(LAYOUTS) == 6
