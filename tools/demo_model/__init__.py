"""The parts of tools/train_demo_model.py: the embedded demo model, from sources to figures."""
