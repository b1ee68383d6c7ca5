"""Detectors: one file per detector, pure functions and small states over values and arrays.

Trainer and server run this same code under the same policy, so that a verdict can be recomputed and
compared; every state can be written as JSON and restored.
"""
