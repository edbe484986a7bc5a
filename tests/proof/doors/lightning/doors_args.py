"""Arguments and lines that the scripts of Lightning share: strategy, devices, what a user reads at the end."""

import os
import warnings

import torch

warnings.filterwarnings("ignore")


def parse(parser):
    """Add --strategy and --resume, and parse."""
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.strategy.startswith("shoal"):
        import shoal.neighbours.lightning  # noqa: F401  # it registers the strategies
    return args


def trainer(args):
    """Return the arguments of every Trainer here."""
    return {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "strategy": args.strategy,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def show(trainer, **more):
    """Print the metrics that callbacks see, and further values, on the first process."""
    if trainer.is_global_zero:
        for name, value in {**trainer.callback_metrics, **more}.items():
            print(name, value.item() if isinstance(value, torch.Tensor) else value)
