"""Ops of the model on each device: public ops, their plain-torch twins and the CPU library."""
