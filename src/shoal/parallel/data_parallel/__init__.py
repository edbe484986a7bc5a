"""Data parallelism: ranks run different samples and sum their gradients."""
