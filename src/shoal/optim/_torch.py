"""Private names of torch that this package uses; tested on 2.13."""

from torch.optim.optimizer import _global_optimizer_post_hooks as every_post_hook
from torch.optim.optimizer import _global_optimizer_pre_hooks as every_pre_hook

__all__ = ["every_post_hook", "every_pre_hook"]
