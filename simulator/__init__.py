"""The scheduler under a virtual clock: what a policy does with a load, without a model."""
