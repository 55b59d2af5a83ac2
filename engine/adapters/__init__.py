"""Adapters: those that come with the model, and those that come and go while serving."""
