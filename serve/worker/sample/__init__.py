"""The transforms of logits and the draw, one file each; worker/sampler.py puts them in order."""
