"""Where the embedded model lies."""

from importlib.resources import files
from pathlib import Path

DEMO = Path(str(files("tokenpod.models.demo")))
