"""Context parallelism: ranks share a sequence; attention over parts of it."""
