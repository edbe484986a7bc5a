"""Use of Shoal from scripts and configurations of Accelerate, DeepSpeed and Lightning."""
