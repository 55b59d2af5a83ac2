"""Write the `server` part of the chart's values.schema.json from the settings model.

python tools/chart_schema.py           write it
python tools/chart_schema.py --check   fail if what is there is not what the model gives

The rest of the schema is written by hand. A setting that the chart derives from values of its own
(a port, a rank, a secret's path) is left out: there is one way to say each thing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenpod.service.config.settings import REMOVED, descriptions
from tokenpod.service.config.sources import ServerSettings

SCHEMA = (
    Path(__file__).resolve().parent.parent / "deploy" / "helm" / "tokenpod" / "values.schema.json"
)
#: Settings that templates/_args.tpl makes from other values.
DERIVED = frozenset(
    {
        *("model_id", "revision", "port", "health_port", "loopback_port"),
        *("num_shard", "num_nodes", "node_rank", "master_addr", "master_port", "shard_port"),
        *("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"),
        *("adapter_token_file", "adapter_folder"),
        *("shard_tls_cert", "shard_tls_key", "shard_tls_ca"),
        *("otlp_endpoint", "otlp_service_name", "otlp_sample_ratio"),
        *("metrics_port", "metrics_names"),
        *("lame_duck_seconds", "graceful_termination_timeout"),
        "config",
    }
)
#: Of these, what a pod has no use for: its settings are flags.
UNUSED = frozenset({"config"})
_KEPT = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength")


def server_properties() -> dict[str, Any]:
    """A schema for each setting, by its name in camelCase."""
    fields = ServerSettings.model_json_schema()["properties"]
    there = {_camel(name): _property(name, f) for name, f in fields.items() if name not in DERIVED}
    # templates/_checks.tpl refuses them, and says what to do instead.
    gone = {_camel(name): {"description": f"Removed: {text}."} for name, text in REMOVED.items()}
    return there | gone


def schema() -> str:
    """The whole file, as it should be."""
    there = json.loads(SCHEMA.read_text(encoding="utf-8"))
    there["properties"]["server"]["properties"] = server_properties()
    return json.dumps(there, indent=2, ensure_ascii=False) + "\n"


def _property(name: str, field: dict[str, Any]) -> dict[str, Any]:
    alternatives = field.get("anyOf", [field])
    kind = next(each for each in alternatives if each.get("type") != "null")
    return {
        "description": descriptions()[name],
        **{key: kind[key] for key in _KEPT if key in kind},
    }


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the file is stale")
    if not parser.parse_args().check:
        SCHEMA.write_text(schema(), encoding="utf-8")
        return 0
    if SCHEMA.read_text(encoding="utf-8") != schema():
        print(f"stale: {SCHEMA.name} (run `make docs`)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
