"""Whether a draft model has the served model's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from tokenpod.core.messages import MTP
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer, TokenizerError


def is_head(folder: Path) -> bool:
    """Whether a folder has an EAGLE-3 head or Medusa heads, which guess the served one's tokens."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    if config.get("model_type") == "medusa" or config.get("architectures") == ["MedusaModel"]:
        return True
    return any(config.get(name) is not None for name in ("draft_vocab_size", "medusa_num_heads"))


def check_draft(served: Tokenizer, folder: Path) -> None:
    """Raise TokenizerError unless the tokens of the draft model in `folder` are the served one's.

    Ids that one of them lacks are no fault: files of one tokenizer name more or fewer special
    tokens. A head has no vocabulary but the served model's, and `MTP` is no folder, but a layer of
    that.
    """
    if folder == Path(MTP) or is_head(folder):
        return
    try:
        draft = Tokenizer.load(folder)
    except TokenizerError as error:
        raise TokenizerError(f"--draft-model is {folder}: {error}") from None
    for token_id in range(min(served.vocab_size, draft.vocab_size)):
        ours = served.backend.id_to_token(token_id)
        theirs = draft.backend.id_to_token(token_id)
        if ours is not None and theirs is not None and ours != theirs:
            raise TokenizerError(
                f"--draft-model is {folder}: its token {token_id} is {theirs!r:.60}, and that of"
                f" the served model {ours!r:.60}; a draft model needs the same vocabulary"
            )
