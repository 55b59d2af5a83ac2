"""Train the embedded demo model on the Python standard library's own sources.

python tools/train_demo_model.py prepare    read the sources, train the tokenizer, write tokens
python tools/train_demo_model.py train      train; keep the weights best on held-out modules
python tools/train_demo_model.py evaluate   bits per byte on the held-out modules, completions
python tools/train_demo_model.py all        the three in this order

`prepare` and `evaluate` read the standard library of the interpreter that runs them, so the
figures of the model card need the version that it names. To train on another machine, take along
this file, demo_model/ and the folder that `prepare` wrote. Without a GPU, try `--steps 5 --rows 2`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # `python -P` leaves a script's own folder out

from demo_model.measure import evaluate  # noqa: E402
from demo_model.prepare import prepare  # noqa: E402
from demo_model.training import Options, train  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=("prepare", "train", "evaluate", "all"))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo-model")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--minutes", type=float, help="cut the steps to what fits into this time")
    parser.add_argument("--rows", type=int, default=Options.rows, help="windows in a step")
    parser.add_argument("--length", type=int, default=Options.length, help="tokens in a window")
    parser.add_argument("--learning-rate", type=float, default=Options.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=Options.weight_decay)
    parser.add_argument("--dropout", type=float, default=Options.dropout)
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--evaluate-every", type=int, default=Options.evaluate_every)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if arguments.phase in ("prepare", "all"):
        prepare(arguments.work, arguments.model)
    if arguments.phase in ("train", "all"):
        options = {field.name: getattr(arguments, field.name) for field in fields(Options)}
        train(arguments.work, arguments.model, Options(**options))
    if arguments.phase in ("evaluate", "all"):
        evaluate(arguments.model)


if __name__ == "__main__":
    main()
