"""Opens data, orders it by one integer, and hands it out step by step, whatever the layout."""
