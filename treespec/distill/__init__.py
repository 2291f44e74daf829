"""Distillation: training prompts and what is learned from them."""
