"""Readers of weight files and what turns their tensors into parameters."""
