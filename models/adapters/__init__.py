"""Adapters of a base model, as PEFT saves them: read, cut for a rank, kept, and put into slots."""
