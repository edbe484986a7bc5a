"""Text as samples: rows, chat, fine-tuning examples, tokenizers and tokens."""
