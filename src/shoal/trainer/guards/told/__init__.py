"""Words for what guards found: loaded when there is something to say."""
