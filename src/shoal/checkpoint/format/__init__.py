"""The checkpoint format: manifest, shards, safetensors, folders, listing, lease."""
