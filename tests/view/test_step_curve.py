"""The small curve of the loss in the step line of `shoal train`."""

from __future__ import annotations

from shoal.view.progress import CURVE_STEPS, CURVE_WIDTH, RunProgress, draw_sparkline


def progress_of(losses: list[float | None]) -> RunProgress:
    found = RunProgress(1000)
    for step, loss in enumerate(losses, 1):
        found.add([{"step": step, "loss": loss}], cut_back=False)
    return found


def test_the_step_line_has_a_curve_of_all_steps_so_far() -> None:
    line = progress_of([8.0 - k for k in range(8)]).terminal_line(80)
    assert line == "step 8/1000  loss 1.0000 █▇▆▅▄▃▂▁"
    assert "█" not in progress_of([8.0 - k for k in range(8)]).key_values(), "a pipe gets numbers"


def test_too_few_steps_have_no_curve() -> None:
    assert progress_of([3.0] * (CURVE_WIDTH - 1)).terminal_line(80) == "step 7/1000  loss 3.0000"


def test_steps_without_a_loss_are_left_out() -> None:
    line = progress_of([8.0, None, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]).terminal_line(80)
    assert line.endswith("█▇▆▅▄▃▂▁")


def test_a_long_run_keeps_few_losses_and_its_whole_curve() -> None:
    progress = progress_of([float(k % 2 + (k < 5000)) for k in range(10_000)])
    assert len(progress.losses) <= CURVE_STEPS
    assert draw_sparkline(progress.losses, CURVE_WIDTH) == "████▁▁▁▁"


def test_a_resume_begins_the_curve_anew() -> None:
    progress = progress_of([9.0] * 20)
    progress.add([{"step": 11, "loss": 1.0}], cut_back=True)
    assert progress.losses == [1.0]
