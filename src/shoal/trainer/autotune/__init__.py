"""Choice of layout and micro-batch size for users who leave them open."""
