"""Where a model and its adapters lie. Nothing is downloaded, unless --download says so: a pod that
starts had better not depend on a hub.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from tokenpod.core.adapter_files import CONFIG
from tokenpod.core.messages import MTP
from tokenpod.service.config.resolved import named_adapters
from tokenpod.service.config.sources import ServerSettings, hub_cache

EMBEDDED = "demo"

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: Kubernetes makes an empty folder of a volume whose kind it does not know.
_NO_VOLUME = ", as if its volume were not mounted"
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelNotFound(Exception):
    """There is no such model; the text is one line that says where it was looked for."""


def model_folder(settings: ServerSettings) -> Path:
    """The folder of the model to serve, downloaded first if --download says so.

    Raises ModelNotFound.
    """
    if settings.download is None:
        return resolve_model(settings.model_id, settings.revision)
    # Only now: a server that does not download does without its libraries.
    from tokenpod.service.download.download import download
    from tokenpod.service.download.progress import DownloadBar
    from tokenpod.service.download.store import DownloadError
    from tokenpod.service.download.stores import store_of

    bar = DownloadBar(settings.model_id)
    try:
        store = store_of(settings.model_id, settings.revision)
        return _checked(download(store, settings.download, bar).folder)
    except DownloadError as error:
        raise ModelNotFound(f"--download is {settings.download}: {error}") from None
    finally:
        bar.close()


def draft_folder(settings: ServerSettings) -> Path | None:
    """The folder of what --draft-model names, or `MTP`. Raises ModelNotFound."""
    name = settings.draft_model
    if name is None or name == EMBEDDED:
        return None if name is None else _embedded()
    if name == MTP:
        return Path(MTP)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = snapshot_of(name, "main", f"--draft-model is {name}")
    return _checked(folder)


def adapter_folders(named: str | None) -> list[tuple[str, str]]:
    """Names and folders of what `--lora-adapters` says. Raises ModelNotFound."""
    return [(name, str(_adapter_folder(name, place))) for name, place in named_adapters(named)]


def resolve_model(model_id: str, revision: str | None = None) -> Path:
    """The folder of a model: the embedded one, a local folder, or a snapshot in the hub's cache.

    Args:
        model_id: `demo`, a path, or a name as the hub has it (`org/name`).
        revision: branch, tag or commit of a model in the cache; `main` if None.

    Raises ModelNotFound, also for a folder without a config.json, and for what can't be read.
    """
    if model_id == EMBEDDED:
        return _without_revision(_embedded(), model_id, revision)
    try:
        return _found(model_id, revision)
    except OSError as error:
        text = f"--model-id is {model_id}: {error.filename} can't be read ({error.strerror})"
        raise ModelNotFound(text) from error


def _found(model_id: str, revision: str | None) -> Path:
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return _without_revision(_checked(folder), model_id, revision)
    if folder.is_file():
        raise ModelNotFound(f"--model-id is {model_id}: that is a file; name the folder it is in")
    if not _HUB_NAME.fullmatch(model_id) or model_id.startswith("."):
        raise ModelNotFound(f"--model-id is {model_id}: there is no such folder{_hint(folder)}")
    return _cached(model_id, revision or "main")


def _embedded() -> Path:
    spec = find_spec("tokenpod.models.demo")
    if spec is None or spec.origin is None:
        raise ModelNotFound("--model-id is demo: this installation lacks the embedded model")
    return Path(spec.origin).parent


def _without_revision(folder: Path, model_id: str, revision: str | None) -> Path:
    if revision is not None:
        raise ModelNotFound(
            f"--revision is {revision}: only models in the hub's cache have revisions,"
            f" and --model-id is {model_id}"
        )
    return folder


def _cached(model_id: str, revision: str) -> Path:
    return _checked(snapshot_of(model_id, revision))


def snapshot_of(model_id: str, revision: str, asked: str = "") -> Path:
    """The snapshot of `revision`, in the cache's layout: refs name commits, commits are folders.

    `asked`: the setting that names it, and how; by default --model-id and --revision. Raises
    ModelNotFound.
    """
    cache = hub_cache()
    named, which = f"{asked or '--model-id'} is {model_id}", f"--revision is {revision}"
    if asked:
        named, which = asked, asked
        if not _HUB_NAME.fullmatch(model_id) or model_id.startswith("."):
            raise ModelNotFound(f"{asked}: there is no folder {model_id}")
    repository = cache / f"models--{model_id.replace('/', '--')}"
    if not repository.is_dir():
        # Ours knows no names without an organisation.
        ours, hubs = f"tokenpod download {model_id} FOLDER", f"hf download {model_id}"
        raise ModelNotFound(
            f"{named}: there is no such folder, and the cache {cache} has no such model;"
            f" get it with `{ours if '/' in model_id else hubs}`"
        )
    commit = _commit(repository, revision)
    snapshot = repository / "snapshots" / (commit or "")
    if not commit or not snapshot.is_dir():
        there = sorted(os.listdir(repository / "refs")) if (repository / "refs").is_dir() else []
        raise ModelNotFound(
            f"{which}: the cache has {', '.join(there) or 'no revision'} of"
            f" {model_id}; get it with `hf download {model_id} --revision {revision}`"
        )
    return snapshot


def _commit(repository: Path, revision: str) -> str | None:
    """The commit that a revision names in this cache; None if it names none."""
    if _COMMIT.fullmatch(revision):
        return revision
    references = repository / "refs"
    reference = references / revision
    if ".." in reference.parts or not reference.is_file():
        return None
    return reference.read_text(encoding="utf-8").strip()


def _hint(folder: Path) -> str:
    """Whether the folder that should hold a missing one is empty."""
    above = next(each for each in folder.absolute().parents if each.is_dir())
    return "" if any(above.iterdir()) else f"; {above} is empty{_NO_VOLUME}"


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        empty = "" if any(folder.iterdir()) else f": it is empty{_NO_VOLUME}"
        raise ModelNotFound(f"the model folder {folder} has no config.json{empty}")
    return folder


def _adapter_folder(name: str, place: str) -> Path:
    folder, asked = Path(place).expanduser(), f"--lora-adapters names {name}"
    if not folder.is_dir():
        path, _, revision = place.rpartition("@")
        folder = snapshot_of(path or place, revision if path else "main", asked)
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{asked}: the folder {folder} has no {CONFIG}")
    return folder
