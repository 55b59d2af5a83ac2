"""Make the Python stubs, with types, of every .proto file. Nobody edits what it writes.

python client/stubs.py           write protos/**/*_pb2*.py(i)
python client/stubs.py --check   fail if what is there is not what the .proto files give
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

#: In a checkout these are links to protos/; in a source distribution they are the files.
PROTOS = Path(__file__).resolve().parent / "src" / "tokenpod_client" / "protos"
#: Where the stubs are installed: protoc's own imports name files from the root of protos/.
NAMESPACE = "tokenpod_client.protos"
#: `import a.b_pb2`, `from a.b import c_pb2`, with or without `as`.
_IMPORT = re.compile(r"^(from|import) ([\w.]+)(?= |$)", re.MULTILINE)


def generate(into: Path) -> list[Path]:
    """Write the stubs of every .proto file below `into`; return their paths relative to it."""
    # The build system installs grpcio-tools; nothing else needs it.
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as scratch:
        sources = [str(p.relative_to(PROTOS)) for p in sorted(PROTOS.rglob("*.proto"))]
        # Files have the names that clients' own generators give them, which reflection shows too.
        arguments = [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={scratch}",
            f"--grpc_python_out={scratch}",
            f"--plugin=protoc-gen-mypy={_plugin(Path(scratch), 'main')}",
            f"--plugin=protoc-gen-mypy_grpc={_plugin(Path(scratch), 'grpc')}",
            f"--mypy_out=quiet:{scratch}",
            f"--mypy_grpc_out=quiet,only_async:{scratch}",
            *sources,
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; its message is above")
        made = Path(scratch)
        paths = sorted(p.relative_to(made) for p in made.rglob("*_pb2*.py*"))
        for path in paths:
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            (into / path).write_text(_installed((made / path).read_text()))
    return paths


def _installed(source: str) -> str:
    """A stub whose imports of other stubs name them as they are installed."""
    packages = {".".join(p.relative_to(PROTOS).parent.parts) for p in PROTOS.rglob("*.proto")}

    def named(found: re.Match[str]) -> str:
        module = found[2]
        ours = module in packages or module.rpartition(".")[0] in packages
        return f"{found[1]} {NAMESPACE}.{module}" if ours else found[0]

    return _IMPORT.sub(named, source)


def _plugin(scratch: Path, entry: str) -> Path:
    """An executable that runs mypy-protobuf's `entry` in this interpreter, whatever PATH says."""
    script = scratch / f"plugin-{entry}"
    code = f"from mypy_protobuf.main import {entry}; {entry}()"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -c "{code}"\n')
    script.chmod(0o755)
    return script


def stale() -> list[Path]:
    """The stubs that are missing, left over or out of date, relative to protos/."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = set(generate(Path(scratch)))
        found = (p.relative_to(PROTOS) for p in PROTOS.rglob("*_pb2*.py*"))
        there = {p for p in found if "__pycache__" not in p.parts}
        names = [str(p) for p in fresh]
        _, differ, missing = filecmp.cmpfiles(scratch, PROTOS, names, shallow=False)
    return sorted({Path(p) for p in differ + missing} | (there - fresh))


def main() -> int:
    """Write the stubs, or check them; exit status 1 if they are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the stubs are stale")
    if not parser.parse_args().check:
        generate(PROTOS)
        return 0
    for path in (old := stale()):
        print(f"stale: protos/{path} (run `make stubs`)", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
