"""Facts of models and machines as plain numbers, and data types of estimates."""
