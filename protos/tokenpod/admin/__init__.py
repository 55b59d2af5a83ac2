"""Stubs of what operators ask of a pod that runs."""
