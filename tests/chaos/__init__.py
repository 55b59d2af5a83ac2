"""Attacks on real pods, one after the other, while innocent clients and probes look on."""
