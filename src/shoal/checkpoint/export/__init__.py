"""Export checkpoints: one safetensors file, a folder for transformers or peft."""
