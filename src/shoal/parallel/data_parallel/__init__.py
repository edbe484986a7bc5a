"""Data parallelism: ranks see other samples and sum their gradients."""
