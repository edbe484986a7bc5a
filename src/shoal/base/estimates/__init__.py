"""Facts of models and machines as plain numbers, and the estimates made of them."""
